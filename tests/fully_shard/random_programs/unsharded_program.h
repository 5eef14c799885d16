// What a sharded program is compared with: a plain model and optimizer per rank, all
// here, whose gradients of sharded parameters are replaced by what a reduction over the
// ranks gives.
#pragma once

#include "tests/fully_shard/random_programs/program_losses.h"
#include "tests/fully_shard/random_programs/random_model.h"
#include "tests/fully_shard/random_programs/random_program.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

namespace fsdp::testing {

// How a tensor's gradients are reduced now.
struct Reduction {
  bool synchronize = true;
  double divisor = 1;
};
// By tensor id, after a backward in which `arrived` got gradients on some rank; nothing
// for tensors that are local to a rank.
using ReductionOf = std::function<std::optional<Reduction>(int id, const std::set<int>& arrived)>;

class UnshardedProgram {
 public:
  // `sharded`: the tensors whose gradients are reduced, with what their units ask
  // for.
  UnshardedProgram(const Program& program, std::map<int, UnitSpec> sharded);

  int64_t world() const { return static_cast<int64_t>(models_.size()); }
  const RandomModel& model(int64_t rank) const { return models_[static_cast<size_t>(rank)]; }
  // A parameter and its gradient, in the parameter's own dtype.
  at::Tensor value(int id, int64_t rank) const;
  at::Tensor gradient(int id, int64_t rank) const;
  // What a gradient of the last backward may differ by, element by element; undefined:
  // nothing.
  const at::Tensor& bound(int id) const { return tensors_.at(id).bound; }

  // Loss number `index` of every rank.
  void backward(const std::vector<Losses>& losses, size_t index, bool retain_graph,
                const ReductionOf& reduction_of);
  // Takes a sharded gradient itself where it may be rounded otherwise, so that this does
  // not spread.
  void follow_gradient(int id, const at::Tensor& full);
  void drop_gradients();
  void zero_grad(bool set_to_none);
  void step();

  // Scales the gradients of sharded tensors to a norm of at most `max_norm`.
  struct Clipped {
    double norm = 0;       // before
    double precision = 0;  // relative, to which it is meant
  };
  Clipped clip(double max_norm, double p);

  void set_requires_grad(int id, bool requires_grad);
  // The parameter itself, or what modules compute with.
  void multiply(int id, double factor, bool parameter_itself);

 private:
  // What a gradient of one rank is the sum of.
  struct Arrivals {
    int count = 0;
    at::Tensor magnitude = {};  // the sum of absolute values
    void add(const at::Tensor& gradient);
    void add(const Arrivals& other);
  };
  // What backwards without synchronisation left on one rank; undefined: nothing.
  struct Pending {
    at::Tensor gradient = {};
    Arrivals arrivals = {};
  };
  struct PlainTensor {
    // Its own, its members', that of its gradients on their way to a sum, and the sum's.
    at::ScalarType dtype, computed_in, reduced_in, summed_in;
    std::shared_ptr<const GatherCodec> codec;  // null: members have its values
    std::vector<at::Tensor> members = {};      // per rank
    // Per rank, value and gradient in its own dtype: the member, if that has them.
    std::vector<at::Tensor> parameters = {};
    std::vector<std::shared_ptr<Arrivals>> arrivals = {};  // per rank
    std::vector<Pending> pending = {};                     // per rank
    at::Tensor bound = {};

    bool is_converted() const { return computed_in != dtype || codec; }
    // What its members hold of `parameter`.
    at::Tensor converted(const at::Tensor& parameter) const;
  };
  // What the optimizer updates in a parameter's place, where the member has another dtype
  // or other values; and in bfloat16, since LibTorch rounds it between the steps of an
  // update or not by an element's place in its tensor.
  struct Chunk {
    at::Tensor parameter;
    const ParamSpec* param = nullptr;
    int64_t rank = 0;
    at::Tensor part;
  };

  PlainTensor plain_tensor(int id) const;
  void cast_buffers(const Node& node, const PrecisionSpec& precision);
  // Members hold what their parameters have, in the dtype that they compute in.
  void refresh_members();
  void collect_tensors();
  std::set<int> tensors_with_arrivals() const;
  std::vector<at::Tensor> optimized_tensors(const RandomModel& model);
  at::Tensor take_gradient(PlainTensor& tensor, size_t rank);
  void reduce(PlainTensor& tensor, const Reduction& reduction, const at::Tensor& before);
  void set_bound(PlainTensor& tensor, const at::Tensor& magnitude, const at::Tensor& added,
                 double divisor) const;

  const Program& program_;
  std::map<int, UnitSpec> sharded_;
  std::vector<RandomModel> models_;  // per rank
  std::map<int, PlainTensor> tensors_;
  std::vector<Chunk> chunks_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
};

// How many different parts the ranks of a program have of a tensor.
int64_t parts_of(const Program& program);
// What rank `rank` of the mesh holds of the tensor of such a parameter. A view.
at::Tensor part_of(const at::Tensor& full, const ParamSpec& param, const Program& program,
                   int64_t rank);

}  // namespace fsdp::testing
