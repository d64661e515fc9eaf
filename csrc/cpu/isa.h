// Selection of the instruction set of the kernels.
#pragma once

// EXGRPO_DECLARE(...) declares something in the namespace of each instruction set that was compiled;
// EXGRPO_PICK(name) is a switch that returns `name` of the selected one.
#ifdef HAVE_AVX2
#define EXGRPO_DECLARE_AVX2(...) namespace avx2 { __VA_ARGS__ }
#define EXGRPO_CASE_AVX2(...) case Isa::avx2: return avx2::__VA_ARGS__;
#else
#define EXGRPO_DECLARE_AVX2(...)
#define EXGRPO_CASE_AVX2(...)
#endif
#ifdef HAVE_AVX512
#define EXGRPO_DECLARE_AVX512(...) namespace avx512 { __VA_ARGS__ }
#define EXGRPO_CASE_AVX512(...) case Isa::avx512: return avx512::__VA_ARGS__;
#else
#define EXGRPO_DECLARE_AVX512(...)
#define EXGRPO_CASE_AVX512(...)
#endif
#define EXGRPO_DECLARE(...) \
  namespace baseline { __VA_ARGS__ } EXGRPO_DECLARE_AVX2(__VA_ARGS__) EXGRPO_DECLARE_AVX512(__VA_ARGS__)
#define EXGRPO_PICK(...)                    \
  switch (instruction_set()) {              \
    EXGRPO_CASE_AVX512(__VA_ARGS__)         \
    EXGRPO_CASE_AVX2(__VA_ARGS__)           \
    default: return baseline::__VA_ARGS__;  \
  }

namespace exgrpo {

enum class Isa { baseline, avx2, avx512 };

// The widest one of build and processor, or the one named by EXGRPO_CPU_ISA; throws if that is not available.
Isa instruction_set();

const char* name_of(Isa isa);

}  // namespace exgrpo
