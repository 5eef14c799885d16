// Steps of Muon on plain parameters, for compare_muon.py: on one core, as that runs.
//
//   muon_steps OUT    writes the parameters and momenta after them, by case and position
#include "optim/muon.h"

#include <torch/torch.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr int64_t kSteps = 20;
const std::vector<std::vector<int64_t>> kShapes = {{1, 9},  {9, 1},   {16, 16}, {7, 33},
                                                   {33, 7}, {64, 48}, {48, 64}, {96, 24}};

// The same in compare_muon.py.
torch::Tensor values_of(const std::vector<int64_t>& shape, double seed) {
  const auto place = torch::arange(c10::multiply_integers(shape), torch::kDouble);
  return (place * 0.7 + seed).sin().to(torch::kFloat).view(shape);
}

std::vector<std::pair<std::string, fsdp::MuonOptions>> cases() {
  using fsdp::AdjustLr;
  using fsdp::MuonOptions;
  return {{"defaults", MuonOptions()},
          {"without_nesterov", MuonOptions(2e-2).nesterov(false)},
          {"match_rms", MuonOptions(1e-3).adjust_lr(AdjustLr::kMatchRmsAdamW).weight_decay(0.01)},
          {"match_rms_without_nesterov",
           MuonOptions(1e-3).adjust_lr(AdjustLr::kMatchRmsAdamW).nesterov(false).momentum(0.8)},
          {"other_iteration",
           MuonOptions(2e-2).ns_steps(3).ns_coefficients({3.0, -3.2, 1.2}).eps(1e-3)}};
}

void run(const std::string& path) {
  at::set_num_threads(1);
  c10::Dict<std::string, torch::Tensor> results;
  for (const auto& [name, options] : cases()) {
    std::vector<torch::Tensor> params;
    for (size_t i = 0; i < kShapes.size(); ++i)
      params.push_back(values_of(kShapes[i], static_cast<double>(i)).requires_grad_(true));
    fsdp::Muon muon(params, options);
    for (int64_t step = 0; step < kSteps; ++step) {
      for (size_t i = 0; i < kShapes.size(); ++i)
        params[i].mutable_grad() = values_of(
            kShapes[i], 100.0 + static_cast<double>(i) + 10.0 * static_cast<double>(step));
      muon.step();
    }
    for (size_t i = 0; i < kShapes.size(); ++i) {
      const auto& state = *muon.state().at(params[i].unsafeGetTensorImpl());
      const auto key = name + "/" + std::to_string(i);
      results.insert(key, params[i].detach());
      results.insert(key + "/momentum_buffer",
                     static_cast<const fsdp::MuonParamState&>(state).momentum_buffer());
    }
  }
  const auto bytes = torch::pickle_save(results);
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  TORCH_CHECK(file.flush(), "cannot write ", path);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    TORCH_CHECK_VALUE(argc == 2, "usage: muon_steps OUT");
    run(argv[1]);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
