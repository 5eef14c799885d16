// Makes and changes parameter groups: ordinary parameters become shards, members and
// registry entries; those that fully_shard met on the meta device get values; dtypes
// change in place; and parameters that a module got later are found.
#pragma once

#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/policies.h"
#include "fully_shard/units/module_tree.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

struct NewParam {
  std::string name;
  at::Tensor tensor;
  Shard cut = {};
  std::shared_ptr<const GatherCodec> codec = nullptr;  // null: its values are gathered
};

// Shards `params` (distinct, valid) over the mesh of `info`: changes their tensors in
// place into members, on the mesh's device. Returns what the registry is to hold, in the
// same order; the group lives as long as one of these, or a member. Of `precision`:
// param_dtype, reduce_dtype and cast_forward_inputs. Local.
std::vector<at::Tensor> build_group(GroupInfo info, const std::vector<NewParam>& params,
                                    const MixedPrecisionPolicy& precision);

// Puts the shards on `device`. Parameter by parameter, value_of(tensor) is the whole
// value of what the parameter was on the meta device, on any device; undefined: zeros, to
// be written. Nothing where there are values; where value_of throws, nothing changed.
// Local.
void materialize(FSDPParamGroup& group, c10::Device device,
                 const std::function<at::Tensor(const at::Tensor&)>& value_of);

// A new storage for the member of parameter `index`: empty, or the shard itself where
// nothing is ever sent. Local.
void make_member(FSDPParamGroup& group, int64_t index);

// Module::to(dtype) on a sharded module: gives parameter `index` the dtype and this
// rank's part of `from`, which becomes what the registry entry is to be. Throws
// ValueError while a graph, a gradient or a pointer may still use the old one. Local.
void change_dtype(FSDPParamGroup& group, int64_t index, const at::Tensor& from);

// Throws ValueError where a member can not have another dtype now, as for change_dtype().
void check_precision_may_change(const FSDPParamGroup& group);
// Whether members are what the shards are in full precision only: a param_dtype, a codec.
bool has_less_precision(const FSDPParamGroup& group);
// In evaluation: floating members have the dtype of their entries, and are gathered as
// they are; false: again as the group was made. Throws as the check, with nothing
// changed.
void set_full_precision(FSDPParamGroup& group, bool full_precision);

// Parameters with a codec that are no codes yet. Throws ValueError for one that is
// trained or has a gradient, is not cut along dimension 0, lies over a mesh of its own,
// or is in use, as for change_dtype(); in full precision, and while gradients of the unit
// wait. Local.
std::vector<int64_t> parameters_to_store(FSDPParamGroup& group);
// Those are codes from now on: their shards and their entries, uint8 [rows, bytes].
// Throws what a codec throws, with the group as it was. Local.
void store_codes(FSDPParamGroup& group, const std::vector<int64_t>& to_store);

// Notices parameters that a managed module got after fully_shard (an adapter, a replaced
// sub-module): plain tensors whose gradients nobody reduces, so that the ranks' copies
// would drift apart without a word. Parameters outside every unit cannot be seen.
// Throws ValueError for the first trainable parameter that is registered in the modules
// of any unit below `group`'s root, those without parameters of their own included, and
// that neither a unit has nor an option ignores: whether or not it got a gradient here,
// so on all ranks alike. For the end of every backward, once per root: it walks the
// modules' registries and reads no values. Local.
void check_no_late_parameters(const FSDPParamGroup& group);

// Names of units and parameters: paths from the unit's own module until an ancestor is
// sharded, then from that, in the end from the root. A unit of several modules has no
// module that they could start from; its i-th one's names begin with "[i]" until then.

// `found` and all units below it are named from the module that `found` was found in.
void name_from_above(const FoundUnit& found);

}  // namespace fsdp::internal
