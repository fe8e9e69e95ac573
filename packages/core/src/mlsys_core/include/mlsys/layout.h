// The declarations that Python shares with a library: structs, enums, constants and functions are written once, in C++,
// and `mlsys_core.native.structs` builds its side from what the library says of itself.
//
//     MLSYS_ENUM(Activation, IDENTITY, RELU)      // declares the enum, int32_t, counted from 0
//     struct Norm { Activation activation; float eps; const float* weight; };
//     MLSYS_STRUCT(Norm, activation, eps, weight);  // all fields, in their order; else it does not compile
//     MLSYS_CONSTANTS(PANEL, RUN);
//     MLSYS_FUNCTIONS(make_norm, free_norm);        // extern "C"
//
// A library is one translation unit. All here has internal linkage: the libraries of a process share nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

namespace mlsys {
namespace {

template <class T, class = void>
struct IsShared : std::false_type {};
template <class T>  // `mlsys_name` is declared beside each shared struct and enum, and found by its argument
struct IsShared<T, std::void_t<decltype(mlsys_name((const T*)nullptr))>> : std::true_type {};

// As Python reads it: "i4" is a number of four bytes, "p" an address, "*Norm" the address of a shared struct, "i4[3]" an
// array, "Norm" a shared struct or enum itself.
struct Type {
    const char* name;
    bool is_address = false;  // of a shared struct
    size_t count = 0;         // of an array
};

template <class T>
constexpr Type type_of() {
    using U = std::remove_cv_t<T>;
    if constexpr (std::is_void_v<U>) {
        return {"v"};
    } else if constexpr (std::is_array_v<U>) {
        return {type_of<std::remove_extent_t<U>>().name, false, std::extent_v<U>};
    } else if constexpr (std::is_pointer_v<U>) {
        using Target = std::remove_cv_t<std::remove_pointer_t<U>>;
        if constexpr (std::is_class_v<Target> && IsShared<Target>::value) return {mlsys_name((const Target*)nullptr), true};
        return {"p"};
    } else if constexpr (IsShared<U>::value) {
        return {mlsys_name((const U*)nullptr)};
    } else {
        static_assert(std::is_arithmetic_v<U>, "a struct or enum that is not shared itself");
        constexpr const char* names[3][9] = {
            {"", "i1", "i2", "", "i4", "", "", "", "i8"},
            {"", "u1", "u2", "", "u4", "", "", "", "u8"},
            {"", "", "", "", "f4", "", "", "", "f8"}};
        return {names[std::is_floating_point_v<U> ? 2 : std::is_unsigned_v<U>][sizeof(U)]};
    }
}

template <class... Fields>
constexpr bool is_ascending(const Fields&... fields) {
    const void* const addresses[] = {&fields...};
    for (size_t i = 1; i < sizeof...(fields); i++)
        if (!(addresses[i - 1] < addresses[i])) return false;
    return true;
}

// One declaration a line, its parts between bars.
std::string& declarations() {
    static std::string text;
    return text;
}

[[maybe_unused]] void add_type(const Type& type) {
    std::string& text = declarations();
    if (type.is_address) text += '*';
    text += type.name;
    if (type.count) text += '[' + std::to_string(type.count) + ']';
}

struct Field {
    Type type;
    size_t offset;
};

[[maybe_unused]] bool add_struct(const char* name, const char* names, size_t size, std::initializer_list<Field> fields) {
    std::string& text = declarations();
    (((text += "struct|") += name) += '|') += names;
    text += '|' + std::to_string(size);
    for (const Field& field : fields) {
        text += '|';
        add_type(field.type);
        text += '@' + std::to_string(field.offset);
    }
    text += '\n';
    return true;
}

[[maybe_unused]] bool add_enum(const char* name, const char* names) {
    ((((declarations() += "enum|") += name) += '|') += names) += '\n';
    return true;
}

[[maybe_unused]] bool add_constants(const char* names, std::initializer_list<int64_t> values) {
    (declarations() += "constants|") += names;
    for (int64_t value : values) declarations() += '|' + std::to_string(value);
    declarations() += '\n';
    return true;
}

[[maybe_unused]] void add_signature(std::initializer_list<Type> types) {
    declarations() += '|';
    for (const Type& type : types) add_type(type), declarations() += ' ';
}

template <class... Fields>
bool declare_struct(const char* name, const char* names, size_t size, const void* whole, const Fields&... fields) {
    return add_struct(name, names, size, {Field{type_of<Fields>(), (size_t)((const char*)&fields - (const char*)whole)}...});
}

template <class Result, class... Arguments>
void declare_function(Result (*)(Arguments...)) {
    add_signature({type_of<Result>(), type_of<Arguments>()...});
}

template <class... Functions>
bool declare_functions(const char* names, Functions... functions) {
    (declarations() += "functions|") += names;
    (declare_function(functions), ...);
    declarations() += '\n';
    return true;
}

}  // namespace
}  // namespace mlsys

extern "C" __attribute__((visibility("default"), used)) const char* mlsys_declarations() {
    return mlsys::declarations().c_str();
}

#define MLSYS_JOIN_(a, b) a##b
#define MLSYS_JOIN(a, b) MLSYS_JOIN_(a, b)
#define MLSYS_ONCE [[maybe_unused]] static const bool MLSYS_JOIN(mlsys_declared_, __COUNTER__)

// The structured binding takes exactly as many names as there are fields; in the derived struct each must be one.
#define MLSYS_STRUCT(Struct, ...)                                                                           \
    [[maybe_unused]] static const char* mlsys_name(const Struct*) { return #Struct; }                       \
    struct Struct##Shared : Struct {                                                                        \
        static void mlsys_take_all(Struct& mlsys_whole) { [[maybe_unused]] auto& [__VA_ARGS__] = mlsys_whole; } \
        constexpr bool mlsys_is_in_order() const { return mlsys::is_ascending(__VA_ARGS__); }               \
        bool mlsys_declare() const {                                                                        \
            return mlsys::declare_struct(#Struct, #__VA_ARGS__, sizeof(Struct), this, __VA_ARGS__);         \
        }                                                                                                   \
    };                                                                                                      \
    static_assert(Struct##Shared{}.mlsys_is_in_order(), "the fields of " #Struct " are in another order");  \
    MLSYS_ONCE = Struct##Shared{}.mlsys_declare()

#define MLSYS_ENUM(Enum, ...)                                                     \
    enum Enum : int32_t { __VA_ARGS__ };                                          \
    [[maybe_unused]] static const char* mlsys_name(const Enum*) { return #Enum; } \
    MLSYS_ONCE = mlsys::add_enum(#Enum, #__VA_ARGS__)

#define MLSYS_CONSTANTS(...) MLSYS_ONCE = mlsys::add_constants(#__VA_ARGS__, {__VA_ARGS__})
#define MLSYS_FUNCTIONS(...) MLSYS_ONCE = mlsys::declare_functions(#__VA_ARGS__, __VA_ARGS__)
