// The operators' namespace, to which each file of operators adds its own.
#include <torch/csrc/stable/library.h>

#include <string>

#include "cpu/isa.h"

namespace {

std::string instruction_set() { return exgrpo::name_of(exgrpo::instruction_set()); }

}  // namespace

STABLE_TORCH_LIBRARY(exgrpo_C, library) { library.def("instruction_set() -> str"); }

STABLE_TORCH_LIBRARY_IMPL(exgrpo_C, CompositeExplicitAutograd, library) {
  library.impl("instruction_set", TORCH_BOX(&instruction_set));
}
