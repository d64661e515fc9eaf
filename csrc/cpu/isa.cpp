#include "isa.h"

#include <array>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace exgrpo {
namespace {

constexpr std::array<const char*, 3> names = {"baseline", "avx2", "avx512"};

bool available(Isa isa) {
  switch (isa) {
    case Isa::baseline:
      return true;
#ifdef HAVE_AVX2
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#ifdef HAVE_AVX512
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && available(Isa::avx2);
#endif
    default:
      return false;
  }
}

Isa choose() {
  const char* asked = std::getenv("EXGRPO_CPU_ISA");
  if (asked == nullptr || *asked == '\0') {
    return available(Isa::avx512) ? Isa::avx512 : available(Isa::avx2) ? Isa::avx2 : Isa::baseline;
  }
  const std::string setting = std::string("EXGRPO_CPU_ISA=") + asked;
  for (size_t i = 0; i < names.size(); ++i) {
    if (std::string(asked) == names[i]) {
      if (!available(static_cast<Isa>(i))) {
        throw std::runtime_error(setting + ": this processor or build does not have it; unset it, or take another");
      }
      return static_cast<Isa>(i);
    }
  }
  throw std::runtime_error(setting + ": expected baseline, avx2 or avx512");
}

}  // namespace

Isa instruction_set() {
  static const Isa chosen = choose();
  return chosen;
}

const char* name_of(Isa isa) { return names[static_cast<size_t>(isa)]; }

}  // namespace exgrpo
