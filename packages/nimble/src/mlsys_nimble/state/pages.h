// Pages that the kernel reports as written: userfaultfd's asynchronous write protection and PAGEMAP_SCAN (Linux 6.7).
//
// Numbers and structs are the kernel's interface, written here since many systems' headers are older than their kernels.
#pragma once

#include <cerrno>
#include <cstdint>

#ifdef __linux__
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nimble {

enum PageState : uint8_t { UNWRITTEN, WRITTEN, LOST };  // LOST: the kernel does not watch the range (any more)

#if defined(__linux__) && defined(SYS_userfaultfd)

class Pages {
  public:
    // Return 0 or the error's number.
    int open() {
        constexpr int user_mode_only = 1, wipe_on_fork = 18;
        fault = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | user_mode_only);
        if (fault < 0) return errno;
        struct { uint64_t api = 0xaa, features = 1 << 13 | 1 << 15, ioctls = 0; } wanted;  // unpopulated pages; asynchronous
        if (ioctl(fault, _IOWR(0xaa, 0x3f, uint64_t[3]), &wanted)) return errno;
        map = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
        if (map < 0) return errno;
        void* page = mmap(nullptr, sizeof *own, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED) return errno;
        own = (int32_t*)page;
        if (madvise(page, sizeof *own, wipe_on_fork)) return errno;
        *own = 1;
        return 0;
    }

    ~Pages() {
        if (fault >= 0) close(fault);
        if (map >= 0) close(map);
        if (own) munmap((void*)own, sizeof *own);
    }

    // Forked processes find a zero: the descriptors tell of their parent's memory.
    const int32_t* is_own() const { return own; }

    int arm(uint64_t begin, uint64_t end) const {
        struct { uint64_t begin, nbytes, mode, ioctls; } entry{begin, end - begin, 2, 0};
        if (ioctl(fault, _IOWR(0xaa, 0x00, uint64_t[4]), &entry)) return errno;
        struct { uint64_t begin, nbytes, mode; } protection{begin, end - begin, 1};
        while (ioctl(fault, _IOWR(0xaa, 0x06, uint64_t[3]), &protection))
            if (errno != EAGAIN && errno != EINTR) return errno;
        return 0;
    }

    int disarm(uint64_t begin, uint64_t end) const {
        struct { uint64_t begin, nbytes; } range{begin, end - begin};
        return ioctl(fault, _IOR(0xaa, 0x01, uint64_t[2]), &range) ? errno : 0;
    }

    // Pages that are absent count as written: they may have been thrown away, and read as zeros.
    PageState look(uint64_t begin, uint64_t end) const {
        constexpr uint64_t written = 1 << 1, present = 1 << 3, must_be_watched = 1 << 1;
        struct { uint64_t begin, end, categories; } region;
        struct {
            uint64_t size, flags, begin, end, walked, regions, num_regions, max_pages, inverted, all_of, any_of, returned;
        } scan{sizeof scan, must_be_watched, begin, end, 0, (uint64_t)&region, 1, 1, present, 0, written | present, written};
        for (;;) {
            const int found = ioctl(map, _IOWR('f', 16, uint64_t[12]), &scan);
            if (found >= 0) return found ? WRITTEN : UNWRITTEN;
            if (errno != EINTR && errno != EAGAIN) return LOST;
        }
    }

  private:
    int fault = -1, map = -1;
    int32_t* own = nullptr;
};

#else

class Pages {  // of a system that cannot
  public:
    int open() { return ENOSYS; }
    const int32_t* is_own() const { return nullptr; }
    int arm(uint64_t, uint64_t) const { return ENOSYS; }
    int disarm(uint64_t, uint64_t) const { return ENOSYS; }
    PageState look(uint64_t, uint64_t) const { return LOST; }
};

#endif
}  // namespace nimble
