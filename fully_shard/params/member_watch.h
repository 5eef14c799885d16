// Notices a member that its module no longer holds: after `linear->weight = other` the
// model computes with `other`, and the sharded parameter would silently train no more.
// Handles can not be watched, but they can be counted: a parameter that the model held
// when it was sharded, and that now only its registry entry holds, was reassigned.
//
// Whatever else holds a member (a graph, a copy of the handle) delays the discovery.
// Silent by design: a parameter that is frozen, that no living module registers any more,
// or that operators reach through its registry entry (ParameterList,
// named_parameters()["w"]). Local.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp::internal {

class FSDPParamGroup;
struct RegistrySlot;

class MemberWatch {
 public:
  MemberWatch() = default;  // watches nothing
  // `slots`: where the parameter's entry is registered.
  explicit MemberWatch(const std::vector<RegistrySlot>& slots);

  // An operator was given the registry entry: the model may well hold no member.
  void entry_was_used() { places_.clear(); }
  bool is_lost(const at::Tensor& member, const at::Tensor& entry) const;

 private:
  struct Place {
    std::weak_ptr<torch::nn::Module> module;
    std::string key;
  };
  std::vector<Place> places_;  // where the entry is registered; empty when nothing is watched
};

// Throws ValueError for the first parameter of `group` whose member was reassigned; every
// time, since what follows trains a model that lacks the parameter.
void check_members_are_held(const FSDPParamGroup& group);

}  // namespace fsdp::internal
