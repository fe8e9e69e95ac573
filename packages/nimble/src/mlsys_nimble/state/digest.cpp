// Looks at memory for what has changed: digests of bytes, read at the speed of memory, and entries of dictionaries.
#include <cstdint>

#include "digest.h"
#include "pages.h"

using namespace nimble;

extern "C" uint64_t nimble_digest(const void* const* pointers, const int64_t* nbytes, int64_t count) {
    uint64_t state = count;
    for (int64_t piece = 0; piece < count; piece++) {
        Sums sums;
        sums.read((const char*)pointers[piece], nbytes[piece]);
        state = sums.into(state, nbytes[piece]);
    }
    return state;
}

// CPython's own, found in the process; called with the interpreter's lock (through ctypes.PyDLL).
extern "C" void* PyDict_GetItemWithError(void* dictionary, void* key) __attribute__((weak));
extern "C" intptr_t PyDict_Size(void* dictionary) __attribute__((weak));

// Return the first entry that is not the object held, `count` if all are, -1 where the interpreter has no such function.
extern "C" int64_t nimble_first_changed(
    void* const* dictionaries, void* const* keys, void* const* held, int64_t count) {
    if (!PyDict_GetItemWithError) return -1;
    for (int64_t entry = 0; entry < count; entry++)
        if (PyDict_GetItemWithError(dictionaries[entry], keys[entry]) != held[entry]) return entry;
    return count;
}

// Return the first dictionary that has not the number of entries held; `count` and -1 as above.
extern "C" int64_t nimble_first_resized(void* const* dictionaries, const int64_t* sizes, int64_t count) {
    if (!PyDict_Size) return -1;
    for (int64_t number = 0; number < count; number++)
        if (PyDict_Size(dictionaries[number]) != sizes[number]) return number;
    return count;
}

// Return what watches pages of this process, or null and the error's number.
extern "C" Pages* nimble_pages_open(int32_t* error) {
    auto* pages = new Pages;
    *error = pages->open();
    if (!*error) return pages;
    delete pages;
    return nullptr;
}

extern "C" void nimble_pages_close(Pages* pages) { delete pages; }
extern "C" const int32_t* nimble_pages_own(const Pages* pages) { return pages->is_own(); }
extern "C" int32_t nimble_pages_arm(const Pages* pages, uint64_t begin, uint64_t end) { return pages->arm(begin, end); }
extern "C" int32_t nimble_pages_disarm(const Pages* pages, uint64_t begin, uint64_t end) {
    return pages->disarm(begin, end);
}

// Write the state of each range, and return how many are not UNWRITTEN.
extern "C" int64_t nimble_pages_scan(const Pages* pages, const uint64_t* ranges, int64_t count, uint8_t* states) {
    int64_t found = 0;
    for (int64_t number = 0; number < count; number++) {
        states[number] = pages->look(ranges[2 * number], ranges[2 * number + 1]);
        found += states[number] != UNWRITTEN;
    }
    return found;
}
