// When groups go and what is gathered ahead: guesses that cost time when wrong, never
// values. They depend on the sequence of touches only, so every rank guesses alike.
//
// There are no pass boundaries to rely on (evaluation, generation, recomputation), so the
// schedule keeps a successor table: per kind of pass, previous group and group, the group
// that followed last time. See docs/design.md, "Schedule".
#pragma once

#include "on_demand/pass.h"

#include <map>
#include <tuple>
#include <vector>

namespace fsdp::internal {

class ParamGroup;

class Schedule {
 public:
  // Groups take part from construction to destruction, in registration order.
  void add(ParamGroup& group);
  void remove(ParamGroup& group);

  // True when `group` was also the last one touched in this kind of pass: nothing is to
  // be decided.
  bool is_current(const ParamGroup& group, Pass pass) const {
    return current_ == &group && kind_ == kind_of(pass);
  }
  // `group` is touched and was not current: records the step and empties the groups that
  // are done.
  void advance(ParamGroup& group, Pass pass);
  // Issues the gathers expected after the current group, which is unsharded by now.
  void prefetch();
  // Empties every group that may go; what is learned stays.
  void end_backward();
  // Forgets what was learned.
  void forget();

  const std::vector<ParamGroup*>& groups() const { return groups_; }

 private:
  enum class Kind { kTraining, kInference, kBackward };
  static Kind kind_of(Pass pass);
  bool may_leave(const ParamGroup& group, const ParamGroup& entered, bool inference_ended) const;
  ParamGroup* expected_successor() const;

  std::vector<ParamGroup*> groups_;
  std::map<std::tuple<Kind, ParamGroup*, ParamGroup*>, ParamGroup*> successors_;
  Kind kind_ = Kind::kTraining;
  ParamGroup* current_ = nullptr;
  ParamGroup* previous_ = nullptr;
  ParamGroup* first_ = nullptr;  // touched first since the kind changed
};

}  // namespace fsdp::internal
