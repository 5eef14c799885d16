// The module that a random program describes.
#pragma once

#include "fully_shard/gather_codec.h"
#include "tests/fully_shard/random_programs/random_program.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>

namespace fsdp::testing {

// One forward: what may differ from one to the next.
struct Forward {
  int64_t rank = 0;  // of the data; decides masks
  bool condition = true;
  int throw_at = -1;           // throws PlannedException at this node
  int throw_backward_at = -1;  // throws PlannedException in backward, at this node's output
};

struct PlannedException : std::runtime_error {
  PlannedException() : std::runtime_error("planned") {}
};

class RandomBlock;

// Who brings the inputs of an operator into the dtype that its parameter computes in:
// nobody, so that dtypes promote; the model's own code; or the unit's policy.
enum class InputCast { kNone, kByModel, kByPolicy };

// A tensor of the model under its id; ties have one.
struct ModelTensor {
  at::Tensor member;
  torch::nn::Module* holder = nullptr;  // has the registry entry
  std::string key;
  std::shared_ptr<InputCast> input_cast = std::make_shared<InputCast>(InputCast::kNone);

  at::Tensor entry() const;  // as the registry has it now
};

struct RandomModel {
  std::shared_ptr<RandomBlock> root;
  std::map<int, std::shared_ptr<torch::nn::Module>> blocks;  // by node id
  std::map<int, ModelTensor> tensors;                        // by parameter id
  c10::Device device = at::kCPU;                             // of its inputs

  at::Tensor forward(const at::Tensor& x, const Forward& forward) const;
  torch::nn::Module& module() const;
};

at::ScalarType scalar_type(Dtype dtype);

// What is gathered of `parameter`, plain and whole; null: its values.
std::shared_ptr<const GatherCodec> codec_of(const PrecisionSpec& precision,
                                            const at::Tensor& parameter);

// The same values on every call with one program, drawn from LibTorch's default
// generator. Local.
RandomModel build_model(const Program& program);
// The same on the meta device, to be given these values by materialize().
RandomModel build_deferred(const Program& program);

}  // namespace fsdp::testing
