// One rank of this library's half of compare_with_fsdp2.py, which starts it and explains
// the comparison. What is computed here calls the operators that are called there, in the
// same order.
//
//   parity_rank DATA OUT CASE...
//
// DATA: what torch.save wrote of a dict: "text", int64 [steps, ranks, batch, tokens + 1],
// and the weights by the names of their parameters. Writes to OUT/CASE.rankR, for
// torch.load, a dict of "losses", float64 [steps], and the first step's gradients, whole.
// A case is MESH-POLICY, as 2x2-bf16; 2x2 replicates over the first dimension.
#include "device_mesh/device_mesh.h"
#include "device_mesh/process_group.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

using torch::Tensor;
using Tensors = c10::Dict<std::string, Tensor>;

Tensors read_tensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK_VALUE(file, "cannot read ", path);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  Tensors tensors;
  for (const auto& entry : torch::pickle_load(bytes).toGenericDict())
    tensors.insert(entry.key().toStringRef(), entry.value().toTensor());
  return tensors;
}

void write_tensors(const Tensors& tensors, const std::string& path) {
  const auto bytes = torch::pickle_save(tensors);
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  TORCH_CHECK(file.flush(), "cannot write ", path);
}

// A module whose parameters start as `weights` says.
class Weights : public torch::nn::Module {
 protected:
  Weights(const Tensors& weights, std::string prefix)
      : weights_(weights), prefix_(std::move(prefix)) {}
  Tensor weight(const std::string& name) {
    return register_parameter(name, weights_.at(prefix_ + name).clone());
  }

 private:
  Tensors weights_;
  std::string prefix_;
};

struct BlockImpl : Weights {
  BlockImpl(const Tensors& weights, const std::string& prefix) : Weights(weights, prefix) {}

  Tensor attention(const Tensor& x) {
    const int64_t heads = gain.size(0), head_width = x.size(2) / heads;
    const auto split = [&](const Tensor& y) {
      return y.view({x.size(0), x.size(1), heads, head_width}).transpose(1, 2);
    };
    const auto qkv_of_x = torch::linear(x, qkv).chunk(3, -1);
    const auto scores = torch::matmul(split(qkv_of_x[0]), split(qkv_of_x[1]).transpose(-2, -1)) *
                        std::pow(static_cast<double>(head_width), -0.5);
    const auto future = torch::ones({x.size(1), x.size(1)}, torch::kBool).triu(1);
    const auto weights =
        torch::softmax(scores.masked_fill(future, -std::numeric_limits<double>::infinity()), -1);
    const auto mixed = torch::matmul(weights, split(qkv_of_x[2])) * gain;
    return torch::linear(mixed.transpose(1, 2).reshape(x.sizes()), output, output_bias);
  }

  Tensor mlp(const Tensor& x) {
    return torch::linear(torch::gelu(torch::linear(x, up, up_bias)), down, down_bias);
  }

  Tensor forward(const Tensor& input) {
    const auto width = norm_weight.sizes();
    const auto x = input + attention(torch::layer_norm(input, width, norm_weight, norm_bias));
    return x + mlp(torch::layer_norm(x, width, mlp_norm_weight, mlp_norm_bias));
  }

  Tensor norm_weight = weight("norm_weight"), norm_bias = weight("norm_bias");
  Tensor qkv = weight("qkv"), gain = weight("gain");
  Tensor output = weight("output"), output_bias = weight("output_bias");
  Tensor mlp_norm_weight = weight("mlp_norm_weight"), mlp_norm_bias = weight("mlp_norm_bias");
  Tensor up = weight("up"), up_bias = weight("up_bias");
  Tensor down = weight("down"), down_bias = weight("down_bias");
};
TORCH_MODULE(Block);

struct ModelImpl : Weights {
  explicit ModelImpl(const Tensors& weights) : Weights(weights, "") {
    for (int64_t i = 0; weights.contains("block" + std::to_string(i) + ".qkv"); ++i) {
      const auto name = "block" + std::to_string(i);
      blocks.push_back(register_module(name, Block(weights, name + ".")));
    }
  }

  Tensor forward(const Tensor& tokens) {
    auto x = torch::embedding(embedding, tokens);
    for (auto& block : blocks) x = fsdp::forward(block, x);
    return torch::linear(torch::layer_norm(x, norm_weight.sizes(), norm_weight, norm_bias), head);
  }

  Tensor embedding = weight("embedding");
  Tensor norm_weight = weight("norm_weight"), norm_bias = weight("norm_bias");
  Tensor head = weight("head");
  std::vector<Block> blocks;
};
TORCH_MODULE(Model);

struct Case {
  std::vector<int64_t> mesh;
  fsdp::MixedPrecisionPolicy policy, policy_of_root;
};

fsdp::MixedPrecisionPolicy policy_called(const std::string& name) {
  if (name == "fp32") return {};
  if (name == "bf16") return {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  if (name == "bf16_unset") return {.param_dtype = at::kBFloat16};
  TORCH_CHECK_VALUE(name == "bf16_sums", "policy: ", name,
                    ", allowed are fp32, bf16, bf16_unset and bf16_sums");
  return {.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16};
}

Case parse_case(const std::string& name) {
  const auto dash = name.find('-');
  TORCH_CHECK_VALUE(dash != std::string::npos, "case: ", name, ", expected MESH-POLICY");
  Case result;
  std::istringstream sizes(name.substr(0, dash));
  for (std::string size; std::getline(sizes, size, 'x');) result.mesh.push_back(std::stoll(size));
  result.policy = result.policy_of_root = policy_called(name.substr(dash + 1));
  if (result.policy.param_dtype) result.policy_of_root.output_dtype = at::kFloat;
  return result;
}

Tensor loss_of(Model& model, const Tensor& text) {
  const auto tokens = text.size(1) - 1;
  const auto logits = fsdp::forward(model, text.narrow(1, 0, tokens));
  return torch::cross_entropy_loss(logits.flatten(0, 1), text.narrow(1, 1, tokens).flatten());
}

// Returns the losses, and the first step's gradients by name.
Tensors train(const Case& of, const Tensors& data, int64_t rank) {
  const auto mesh = fsdp::init_device_mesh(torch::kCPU, of.mesh);
  Model model(data);
  for (auto& block : model->blocks) fsdp::fully_shard(block, mesh, {.mp_policy = of.policy});
  fsdp::fully_shard(model, mesh, {.mp_policy = of.policy_of_root});
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3).eps(1e-4));

  Tensors results;
  const auto texts = data.at("text").select(1, rank);
  auto losses = torch::empty({texts.size(0)}, torch::kDouble);
  for (int64_t step = 0; step < texts.size(0); ++step) {
    optimizer.zero_grad();
    const auto loss = loss_of(model, texts[step]);
    loss.backward();
    if (step == 0) {
      for (const auto& parameter : model->named_parameters())
        results.insert(parameter.key(), fsdp::DTensor(parameter->grad()).full_tensor());
    }
    optimizer.step();
    losses[step] = loss.item<double>();
  }
  results.insert("losses", losses);
  return results;
}

void run(const std::vector<std::string>& arguments) {
  TORCH_CHECK_VALUE(arguments.size() > 2, "usage: parity_rank DATA OUT CASE...");
  at::set_num_threads(1);
  const auto rank = fsdp::launch_environment().rank;
  fsdp::init_process_group({.backend = "gloo"});
  const auto data = read_tensors(arguments[0]);
  for (size_t i = 2; i < arguments.size(); ++i) {
    write_tensors(train(parse_case(arguments[i]), data, rank),
                  arguments[1] + "/" + arguments[i] + ".rank" + std::to_string(rank));
  }
  fsdp::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run({argv + 1, argv + argc});
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
  }
  return 1;
}
