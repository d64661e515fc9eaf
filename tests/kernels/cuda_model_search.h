// Runs of a model of concurrent parties, all of them: what each order of their actions leads to.
//
// A model has a State of bytes, initial(), each_action(state, attempt), finished(state) and key(state), a hash that
// states may share which differ only in the names of equal parties. An action throws a Violation where it must not
// happen. The search remembers keys of 64 bits: among n states two have the same key with a probability of n^2 / 2^65,
// 3e-6 for ten million.
#ifndef EXGRPO_CUDA_MODEL_SEARCH_H
#define EXGRPO_CUDA_MODEL_SEARCH_H

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_set>
#include <vector>

namespace model {

struct Violation {
  const char* what;
};

struct Action {
  const char* what;
  int block, consumer, warp, round;  // -1: has none
};

// Field by field Explored of test_cuda_pipeline.py.
struct Explored {
  int64_t states;
  const char* violation;  // null: none; lives until the thread's next search, as the next one
  const char* run;        // the actions that lead to it
};

template <typename State>
uint64_t hash(const State& state) {
  static_assert(std::has_unique_object_representations_v<State>, "the hash is that of all bytes");
  return std::hash<std::string_view>()({reinterpret_cast<const char*>(&state), sizeof state});
}

template <typename Model>
class Search {
 public:
  explicit Search(const Model& model) : model_(model) {}

  Explored all() {
    thread_local std::string run;
    const char* violation = nullptr;
    try {
      from(model_.initial());
    } catch (const Violation& found) {
      violation = found.what;
    }
    run.clear();
    for (const Action& action : run_) run += describe(action);
    return {static_cast<int64_t>(seen_.size()), violation, run.c_str()};
  }

 private:
  using State = decltype(std::declval<Model>().initial());

  void from(const State& state) {
    if (!seen_.insert(model_.key(state)).second) return;
    bool moved = false;
    model_.each_action(state, [&](const Action& action, auto&& act) {
      State next = state;
      run_.push_back(action);
      if (act(next)) {
        moved = true;
        from(next);
      }
      run_.pop_back();
    });
    if (!moved && !model_.finished(state)) throw Violation{"deadlock"};
  }

  static std::string describe(const Action& action) {
    std::string text;
    const auto name = [&](const char* party, int number) {
      if (number >= 0) text += party + std::to_string(number) + " ";
    };
    name("block ", action.block);
    name("consumer ", action.consumer);
    name("warp ", action.warp);
    text += action.what;
    if (action.round >= 0) text += " " + std::to_string(action.round);
    return text + "\n";
  }

  const Model& model_;
  std::unordered_set<uint64_t> seen_;
  std::vector<Action> run_;
};

// The number of this name in a list, -1 where it has none.
template <size_t COUNT>
int number_of(const char* name, const char* const (&names)[COUNT]) {
  for (size_t i = 0; i < COUNT; ++i) {
    if (!std::strcmp(name, names[i])) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace model

#endif
