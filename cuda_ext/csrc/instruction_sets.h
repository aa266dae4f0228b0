// The instruction sets that kernels are compiled for, an object each, and the choice among them when the process runs.
#pragma once

#include <cstdlib>
#include <string_view>

// Declares a function in the namespace of each set. It is null in the sets that this kind of processor does not have.
#define STILLHOUSE_IN_EACH_SET(...)                  \
  namespace scalar { [[gnu::weak]] __VA_ARGS__; }    \
  namespace neon { [[gnu::weak]] __VA_ARGS__; }      \
  namespace avx2 { [[gnu::weak]] __VA_ARGS__; }      \
  namespace avx512 { [[gnu::weak]] __VA_ARGS__; }

// A function of the set that runs; `neon` has kernels of its own for packed binary weights only.
#define STILLHOUSE_CHOSEN(function)                                                              \
  (stillhouse::cpu::capability() == "avx512" ? stillhouse::cpu::avx512::function                 \
   : stillhouse::cpu::capability() == "avx2" ? stillhouse::cpu::avx2::function                   \
                                             : stillhouse::cpu::scalar::function)

namespace stillhouse::cpu {

#if defined(__x86_64__)
inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
inline bool has_vpopcntdq() { return has_avx512() && __builtin_cpu_supports("avx512vpopcntdq"); }
#else
inline bool has_avx2() { return false; }
inline bool has_avx512() { return false; }
inline bool has_vpopcntdq() { return false; }
#endif

// "avx512", "avx2" or "scalar": what this machine runs, or less when STILLHOUSE_CPU_CAPABILITY says so.
inline std::string_view capability() {
  const char* given = std::getenv("STILLHOUSE_CPU_CAPABILITY");
  const std::string_view limit = given == nullptr ? "" : given;
  if (limit == "scalar" || !has_avx2()) return "scalar";
  return limit == "avx2" || !has_avx512() ? "avx2" : "avx512";
}

}  // namespace stillhouse::cpu
