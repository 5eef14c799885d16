// What a user may ask of one fully_shard call.
#pragma once

#include "dtensor/placement.h"
#include "fully_shard/gather_codec.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace fsdp {

namespace internal {
template <class Number>
concept NumberOfRanks = std::integral<Number> && !std::same_as<Number, bool>;
template <class Number>
inline constexpr bool kTellsWhetherToReshard = !NumberOfRanks<Number>;
}  // namespace internal

// What becomes of the unsharded parameters after forward: freed (true), kept for backward
// (false), or kept as a 1/n piece on n neighbouring ranks (to_world(n)). Takes a bool and
// nothing else: an int would be ambiguous.
class ReshardAfterForward {
 public:
  template <std::same_as<bool> Bool>
  ReshardAfterForward(Bool reshard) : value_(reshard) {}
  // Converts, so that the compiler's error is this one wherever a number is written, also
  // in {.reshard_after_forward = 4}.
  template <internal::NumberOfRanks Number>
  ReshardAfterForward(Number) : value_(true) {
    static_assert(internal::kTellsWhetherToReshard<Number>,
                  "a number of ranks is ReshardAfterForward::to_world(n)");
  }
  [[nodiscard]] static ReshardAfterForward to_world(int64_t n) {
    return ReshardAfterForward(World{n});
  }

  bool reshards() const { return !std::holds_alternative<bool>(value_) || std::get<bool>(value_); }
  std::optional<int64_t> world() const {
    return std::holds_alternative<World>(value_) ? std::optional(std::get<World>(value_).n)
                                                 : std::nullopt;
  }

 private:
  struct World {
    int64_t n;
  };
  explicit ReshardAfterForward(World world) : value_(world) {}
  std::variant<bool, World> value_;
};

// Each dtype is Half, BFloat16, Float or Double. Only floating parameters, gradients,
// buffers, inputs and outputs are cast.
struct MixedPrecisionPolicy {
  // The dtype that modules compute in and that is gathered; shards keep their own. Unset:
  // the parameters' own.
  std::optional<at::ScalarType> param_dtype = {};
  // The dtype that gradients are added up in, over backwards and ranks; unset: the
  // parameters' own, as FSDP2 has it from PyTorch 2.15 on (before: param_dtype). 16-bit
  // types travel as such over the ranks that shard, and are added in Float; sums over
  // replicas travel in Float.
  std::optional<at::ScalarType> reduce_dtype = {};
  // The dtype that buffers of the unit's modules, but not of units below, are cast to in
  // place when fully_shard is applied; unset: they stay. A buffer that two units share
  // goes to the first. Checkpoints save the dtype from before.
  std::optional<at::ScalarType> buffer_dtype = {};
  // The dtype that fsdp::forward casts outputs to; unset: they stay.
  std::optional<at::ScalarType> output_dtype = {};
  // With param_dtype: where an operator uses a parameter, its other floating inputs (of
  // one dimension or more) are cast to that dtype; fsdp::forward casts the inputs of the
  // module.
  bool cast_forward_inputs = true;
};

// When a backward gathers the unit that it expects next. kPre: when a unit is entered.
// kPost: when that unit's gradients have left for their reduction, which needs the memory
// of one unit less; without gradient synchronisation nothing is then gathered ahead. Both
// gather the same units.
enum class BackwardPrefetch { kPre, kPost };

// Shards and their gradients are on the CPU, and so are the optimizer's state and step.
// Only what a gather brings is on the mesh's device. Gathers copy this rank's shards to
// the device, and reductions copy their result back. The host waits for these results
// once, at the end of a backward; without pin_memory it waits for each. On a CPU mesh
// nothing changes. Sharded parameters stay where they are: moving the module throws and
// names the parameter.
struct OffloadPolicy {
  bool offload_to_cpu = false;
  bool pin_memory = true;  // page-locked, as copies to and from a device like it
};

// What the first dimension of a mesh of two is for. kReplicate, hybrid sharding (HSDP):
// its ranks hold the same shards, and sum their gradients. kShardOptimizer (HFSDP, hybrid
// sharding of everything, as Megatron-FSDP's outer_dp_sharding_strategy = "optim"): it
// cuts the shards once more. The registry entries, and with them gradients and the
// optimizer's state, are 1/(all ranks) each; the inner shards that gathers read are put
// together over the first dimension once after a step, in param_dtype, and stay until the
// next one. Values are those of kReplicate. What it costs: docs/placements.md.
enum class Outer { kReplicate, kShardOptimizer };

struct FullyShardOptions {
  std::optional<ReshardAfterForward> reshard_after_forward =
      {};  // unset: true, and false for the root
  // How a parameter is sharded: along a dimension of any size (Shard; negative: counted
  // from the end), in whole blocks of `unit` of its rows, in parts of stated sizes
  // (RaggedShard), or whole on one rank (Owned; Owned{}: on one that evens the bytes of
  // the unit's ranks, then those of all units). On devices rows that travel are as long
  // as that of the rank with the most, so parameters on owners want several in a unit.
  // Called once per managed parameter; nothing: Shard(0). Every rank must answer alike.
  std::function<std::optional<Placement>(const std::string& fqn, const at::Tensor&)>
      shard_placement_fn = {};
  // What travels in the place of a parameter's values when it is gathered
  // (gather_codec.h): codes of its rows, one for each index of the dimension that is cut.
  // Null: the values. Called once per managed parameter; every rank must answer alike.
  // Parts that to_world(n) leaves between forward and backward are values.
  std::function<std::shared_ptr<const GatherCodec>(const std::string& fqn, const at::Tensor&)>
      gather_codec_fn = {};
  // What travels in the place of gradients (gather_codec.h).
  GradientCodecs gradient_codecs = {};
  MixedPrecisionPolicy mp_policy = {};
  OffloadPolicy offload_policy = {};
  // Of a mesh of two dimensions. With kShardOptimizer entries lie on the mesh with its
  // dimensions in the other order, placed Shard along both. The first use of a unit after
  // its entries were written, or its gradients reduced, is collective over the whole
  // mesh, as is what ranks write: a write that some ranks of the first dimension leave
  // out makes the others wait. Parameters are cut by a Shard without unit there.
  Outer outer = Outer::kReplicate;
  std::vector<at::Tensor> ignored_params = {};  // by identity: neither sharded nor reduced
};

}  // namespace fsdp
