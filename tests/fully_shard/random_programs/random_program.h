// Models and training programs drawn from a seed, as plain values: what to build, what to
// shard and how, and what to do. Nodes, parameters and actions refer to each other by id,
// so a part may be removed without touching the rest; what refers to something that is
// not there does nothing.
//
//   const auto program = generate(17);
//   std::cout << to_string(program);
#pragma once

#include "dtensor/placement.h"
#include "fully_shard/policies.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {

// How a parameter enters the forward.
enum class Use {
  kMatmul,  // [rows, width]: x + tanh(x w^T) w
  kBias,    // [width]: x + b
  kGain,    // [rows]: x * (1 + tanh of the sum of squares)
  kMasked,  // [rows]: x + sum, times zero on every other rank
  kNoGrad,  // [rows]: x + sum of squares, under no_grad
  kUnused,  // [rows]
};

// What a model computes with a parameter's registry entry where no gradients are
// recorded, beside what the parameter is used for.
enum class Reading {
  kNone,
  kProduct,     // a matrix: x + tanh(linear(x, w * 1)) (w * 1); else x + the sum of mean(x) p
  kStatistics,  // x times a function of its norm, mean and maximum
  kSlice,       // a matrix: as kProduct, of half of its rows; else x + the sum of one half
};

enum class Dtype { kFloat, kDouble, kBFloat16, kHalf };

// Codecs of which what was decoded has the same codes again.
enum class Code { kMxfp8, kMxint8 };

// A unit's MixedPrecisionPolicy, and the codec of its matrices; unset: nothing is cast.
struct PrecisionSpec {
  std::optional<Dtype> param_dtype = {}, reduce_dtype = {}, buffer_dtype = {};
  std::optional<Code> codec = {};

  bool operator==(const PrecisionSpec&) const = default;
};

struct ParamSpec {
  int id = 0;
  Use use = Use::kBias;
  int rows = 1;
  Dtype dtype = Dtype::kFloat;
  bool frozen = false;     // from the start
  bool ignored = false;    // given to fully_shard as ignored_params
  bool in_list = false;    // lives in a ParameterList, which has registry entries only
  bool penalised = false;  // its squares, read through named_parameters(), are added
  Reading reading = Reading::kNone;
  int tied_to = -1;         // is the tensor of this parameter
  bool anchor = false;      // trained in every backward: neither frozen nor removed
  bool by_columns = false;  // a matrix that is sharded along dimension 1
  // What the ranks have of it is as these, in turn: parts of stated sizes, or an owner's.
  // Empty, or nothing but 0: as torch.chunk cuts.
  std::vector<int> weights = {};
  // Over the tensor-parallel ranks: cut, or copied. Nothing: it stays plain.
  std::optional<Placement> placement = {};
};

struct UnitSpec {
  std::optional<bool> reshard_after_forward = {};
  bool to_halves = false;  // of four shards: to_world(2) in place of true
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  double divide_factor = 0;  // 0: unset
  PrecisionSpec precision = {};
  bool offload = false;  // OffloadPolicy, which changes nothing on the CPU
  bool custom_gather = false, custom_reduction = false;            // the ready-made ones
  std::vector<int> forward_prefetch = {}, backward_prefetch = {};  // node ids
};

struct Node {
  int id = 0;
  std::vector<ParamSpec> params = {};
  std::vector<Node> children = {};
  bool has_buffer = false;  // [width], which its forward adds
  bool is_unit = false;
  bool joins_previous = false;  // one unit with the sibling before
  UnitSpec unit = {};
  int calls = 1;             // in one forward
  bool checkpoint = false;   // recomputed in backward
  bool conditional = false;  // runs only in steps whose condition holds
  bool no_grad = false;      // runs under no_grad
};

enum class ActionKind {
  kTrain,                   // forward, backward
  kSeveralForwards,         // the sum of two losses, one backward
  kSeveralBackwards,        // two losses of one forward, two backwards, the first with retain_graph
  kInterleaved,             // two forwards, then their backwards
  kEvaluateBeforeBackward,  // forward, an evaluation under no_grad, backward
  kEvaluate,                // under no_grad
  kInference,               // under InferenceMode
  kThrowInForward,          // at node `target`
  kThrowInBackward,         // at the output of node `target`; then zero_grad
  kSetSync,                 // of unit `target`, or all when negative, to `flag`
  kSetAllReduce,            // likewise
  kFreeze,                  // parameter `target`
  kUnfreeze,
  kWriteMember,  // under no_grad, times `value`
  kWriteEntry,   // under no_grad, times `value`
  kUnshard,      // unit `target`
  kUnshardAsync,
  kReshard,
  kClip,  // to the norm `value`; `flag`: the maximum norm instead of the 2-norm
  kStep,
  kZeroGrad,
  kZeroGradInPlace,
};

struct Action {
  ActionKind kind = ActionKind::kTrain;
  int target = -1;
  uint64_t data = 0;      // seed of the inputs
  bool condition = true;  // of the conditional nodes
  bool flag = false;
  double value = 0;
};

enum class Optimizer { kSgd, kMomentum, kAdam, kAdamW };

// What collectives of ranks that are threads go through: the memory of the test's own
// backend (tests/support/shared_memory_backend.h), the library's peer memory, with
// unsharded parameters in place or copied, or Gloo.
enum class ProgramTransport : uint8_t { kTestBackend, kInPlace, kCopies, kGloo };

struct Program {
  uint64_t seed = 0;
  int world = 2;
  int replicas = 1;  // hybrid sharding where more than one: a mesh {replicas, shards}
  Outer outer = Outer::kReplicate;  // of all units
  ProgramTransport transport = ProgramTransport::kTestBackend;
  bool evict = false;                     // empty and poison every group after every operator
  bool deferred = false;                  // built without values, sharded, materialized
  bool prefetch_after_gradients = false;  // all units: BackwardPrefetch::kPost
  bool weighs_entries = false;            // evaluations have a metric with the norms of all entries
  // Of a tensor-parallel model; each rank of `world` then stands for so many ranks, which
  // have the same inputs. 0: it is none.
  int tensor_ranks = 0;
  bool sharded = true;  // by fully_shard, which may be left out where world is 1
  Dtype activations = Dtype::kFloat;
  int width = 4;
  Optimizer optimizer = Optimizer::kSgd;
  Node root = {};
  std::vector<Action> actions = {};
};

Program generate(uint64_t seed);
std::string to_string(const Program& program);

// In pre-order.
void for_each_node(const Node& root, const std::function<void(const Node&)>& visit);
void for_each_node(Node& root, const std::function<void(Node&)>& visit);
// The parameter with this id, or null.
const ParamSpec* find_param(const Program& program, int id);
// The parameter whose tensor `param` is: the last of its chain of ties.
const ParamSpec& tensor_of(const Program& program, const ParamSpec& param);
// Of a parameter that is sharded.
int64_t sharded_dim(const ParamSpec& param);
// Where the parts of `size` elements begin on each of `shards` ranks, and where the last
// one ends.
std::vector<int64_t> bounds_of_parts(const ParamSpec& param, int64_t size, int64_t shards);
// What shard_placement_fn says of it; none: Shard(0). `size`: of the sharded dimension.
std::optional<Placement> placement_of_cut(const ParamSpec& param, int64_t size, int64_t shards);
// Elements along dimension 0.
int64_t rows_of(const Program& program, const ParamSpec& param);
bool runs_backward(ActionKind kind);
// Whether some unit's param_dtype or codec is set. An entry then has another dtype, or
// other values, than its
// member.
bool casts_members(const Program& program);
// Ranks that hold different shards.
int shards_of(const Program& program);
// Of the mesh that it is sharded over.
std::vector<int64_t> mesh_shape(const Program& program);
// What a unit computes with and reduces gradients in, of a parameter of `dtype`.
Dtype computed_in(const PrecisionSpec& precision, Dtype dtype);
Dtype reduced_in(const PrecisionSpec& precision, Dtype dtype);

}  // namespace fsdp::testing
