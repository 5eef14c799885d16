#include "tests/fully_shard/random_programs/draw_actions.h"

namespace fsdp::testing {
namespace {

class ActionsDrawing {
 public:
  ActionsDrawing(Draws& draws, const ModelSize& size, Program& program)
      : draws_(draws), size_(size), program_(program) {}

  void run() {
    const int rounds = draws_.between(1, 4);
    for (int round = 0; round < rounds; ++round) {
      draw_between();
      if (draws_.chance(20)) draw_accumulation();
      add_backward();
      draw_between();
      if (draws_.chance(15))
        add({.kind = ActionKind::kClip,
             .flag = draws_.chance(30),
             .value = draws_.pick({0.01, 1.0, 100.0})});
      if (draws_.chance(85)) add({.kind = ActionKind::kStep});
      if (draws_.chance(75))
        add({.kind = draws_.pick(
                 {ActionKind::kZeroGrad, ActionKind::kZeroGrad, ActionKind::kZeroGradInPlace})});
    }
  }

 private:
  void add(Action action) {
    action.data = draws_.number(1000000);
    action.condition = draws_.chance(60);
    program_.actions.push_back(action);
  }
  int any_node() { return draws_.between(0, size_.nodes - 1); }
  int any_param() { return draws_.between(0, size_.params - 1); }

  void add_backward() {
    add({.kind = draws_.pick({ActionKind::kTrain, ActionKind::kTrain, ActionKind::kTrain,
                              ActionKind::kSeveralForwards, ActionKind::kSeveralBackwards,
                              ActionKind::kInterleaved, ActionKind::kEvaluateBeforeBackward})});
  }

  void draw_between() {
    if (draws_.chance(20))
      add({.kind = draws_.pick({ActionKind::kEvaluate, ActionKind::kInference})});
    if (draws_.chance(12)) {
      add({.kind = draws_.pick({ActionKind::kThrowInForward, ActionKind::kThrowInBackward}),
           .target = any_node()});
    }
    if (draws_.chance(15))
      add({.kind = draws_.pick({ActionKind::kFreeze, ActionKind::kUnfreeze}),
           .target = any_param()});
    if (draws_.chance(15)) {
      add({.kind = draws_.pick({ActionKind::kWriteMember, ActionKind::kWriteEntry}),
           .target = any_param(),
           .value = draws_.pick({0.5, 0.75, 1.25})});
    }
    if (draws_.chance(20)) {
      add({.kind =
               draws_.pick({ActionKind::kUnshard, ActionKind::kUnshardAsync, ActionKind::kReshard}),
           .target = any_node()});
    }
  }

  void draw_accumulation() {
    add({.kind = ActionKind::kSetSync,
         .target = draws_.chance(30) ? any_node() : -1,
         .flag = false});
    for (int i = draws_.between(1, 2); i > 0; --i) {
      draw_between();
      add_backward();
    }
    add({.kind = ActionKind::kSetSync, .target = -1, .flag = true});
  }

  Draws& draws_;
  const ModelSize& size_;
  Program& program_;
};

}  // namespace

void draw_actions(Draws& draws, const ModelSize& size, Program& program) {
  ActionsDrawing(draws, size, program).run();
}

}  // namespace fsdp::testing
