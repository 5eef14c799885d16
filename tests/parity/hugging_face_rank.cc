// One rank of this library's half of compare_with_transformers.py, which starts it and
// explains the comparison.
//
//   hugging_face_rank FOLDER OUT TP EP FAMILY...
//
// FOLDER/FAMILY is a folder of Hugging Face's; FOLDER/tokens what torch.save wrote of a
// dict of "text", int64 [steps, rows, tokens + 1], and "begins", bool [rows, tokens], of
// documents in the first inputs. Trains each family on all ranks, TP of which compute one
// model together, exports it to OUT/FAMILY, and rank 0 writes to OUT/FAMILY.results, for
// torch.load, a dict of "logits" of the first inputs before training, "logits of
// documents", which are these in pieces, "gradient of NAME" of the first step, NAME being
// the folder's, "losses", float64 [steps], and, after it, "logits afterwards",
// "generated" tokens and the parameters by the folder's names. With FAMILY+lora it trains
// adapters, and exports these; with FAMILY+nf4 too, for 50 steps, beside a base of which
// the parameters are codes. Their first values are "start of NAME".
#include "device_mesh/all_reduce.h"
#include "device_mesh/process_group.h"
#include "dtensor/dtensor.h"
#include "programs/trainer/hugging_face/hugging_face.h"
#include "programs/trainer/setup/sharded_model.h"

#include <torch/torch.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

namespace {

using torch::Tensor;
using Tensors = c10::Dict<std::string, Tensor>;

constexpr int64_t kStepsIn4Bits = 50;

struct Text {
  Tensor tokens, begins;
};

Text read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK_VALUE(file, "cannot read ", path);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  const auto read = torch::pickle_load(bytes).toGenericDict();
  return {read.at("text").toTensor(), read.at("begins").toTensor()};
}

void write_tensors(const Tensors& tensors, const std::string& path) {
  const auto bytes = torch::pickle_save(tensors);
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  TORCH_CHECK(file.flush(), "cannot write ", path);
}

Tensors train(const programs::TrainingOptions& options, const Text& given,
              const fsdp::DeviceMesh& mesh) {
  const auto& text = given.tokens;
  auto model = programs::make_sharded_model(options, mesh).model;
  const auto data_mesh = programs::data_mesh_of(options, mesh);
  const auto rows = text.size(1) / data_mesh.size(), tokens = text.size(2) - 1;
  const auto mine = text.narrow(1, data_mesh.local_rank(0) * rows, rows);
  Tensors results;
  const auto keep_logits = [&](const char* name,
                               const std::optional<programs::Documents>& documents = {}) {
    const torch::NoGradGuard no_grad;
    const auto inputs = text[0].narrow(1, 0, tokens);
    results.insert(name, fsdp::full_tensor(model->forward(inputs, documents)));
  };
  const auto names = programs::hugging_face_names(options.model);
  const auto keep = [&](const std::string& prefix, const std::string& name, const Tensor& tensor) {
    const auto whole = fsdp::full_tensor(tensor).detach().clone();
    const bool is_stacked = programs::is_of_experts(name);
    if (!is_stacked) results.insert(prefix + names(name), whole);
    for (int64_t expert = 0; is_stacked && expert < whole.size(0); ++expert)
      results.insert(prefix + names(programs::expert_name(name, expert)), whole[expert].clone());
  };
  const auto keep_gradients = [&] {
    for (const auto& parameter : model->named_parameters()) {
      if (const auto& gradient = parameter.value().grad(); gradient.defined())
        keep("gradient of ", parameter.key(), gradient);
    }
  };
  const auto keep_parameters = [&](const std::string& prefix) {
    for (const auto& parameter : model->named_parameters())
      keep(prefix, parameter.key(), parameter.value());
  };
  keep_logits("logits");
  keep_logits("logits of documents", programs::documents_of(given.begins));
  auto trained = model->parameters();
  std::erase_if(trained, [](const Tensor& parameter) { return !parameter.requires_grad(); });
  torch::optim::AdamW optimizer(trained, torch::optim::AdamWOptions(1e-3).eps(1e-4));
  if (options.lora.rank > 0) keep_parameters("start of ");
  const int64_t steps = options.lora.stores_nf4 ? kStepsIn4Bits : text.size(0);
  auto losses = torch::empty({steps}, torch::kDouble);
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const auto rows_of_step = mine[step % text.size(0)];
    const auto logits = model->forward(rows_of_step.narrow(1, 0, tokens));
    const auto loss = programs::next_token_loss(logits, rows_of_step.narrow(1, 1, tokens));
    loss.backward();
    if (step == 0) keep_gradients();
    optimizer.step();
    const auto mine_alone = fsdp::full_tensor(loss).item<double>();
    losses[step] = fsdp::all_reduce(mine_alone, data_mesh, fsdp::Reduce::kMean);
  }
  results.insert("losses", losses);
  keep_logits("logits afterwards");
  results.insert("generated", fsdp::full_tensor(model->generate(text[0][0].narrow(0, 0, 5), 8, 0)));
  keep_parameters("");
  const programs::ExportOptions to{.folder = options.export_to, .like = options.init_from};
  options.lora.rank > 0 ? programs::export_adapters(model, options.model, options.lora, to)
                        : programs::export_hugging_face(model, options.model, to);
  return results;
}

void run(const std::vector<std::string>& arguments) {
  TORCH_CHECK_VALUE(arguments.size() > 4, "usage: hugging_face_rank FOLDER OUT TP EP FAMILY...");
  at::set_num_threads(1);
  const auto place = fsdp::launch_environment();
  fsdp::init_process_group({.backend = "gloo"});
  const int64_t tp = std::stoi(arguments[2]), ep = std::stoi(arguments[3]);
  std::optional<fsdp::DeviceMesh> mesh;
  const auto text = read_text(arguments[0] + "/tokens");
  for (size_t i = 4; i < arguments.size(); ++i) {
    programs::TrainingOptions options;
    const auto family = arguments[i].substr(0, arguments[i].find('+'));
    if (family != arguments[i])
      options.lora = {.rank = 4,
                      .targets = {"query", "down"},
                      .frozen_dtype = torch::kFloat,
                      .stores_nf4 = arguments[i] == family + "+nf4"};
    options.init_from = arguments[0] + "/" + family;
    options.export_to = arguments[1] + "/" + arguments[i];
    options.model = programs::hugging_face_config(options.init_from);
    options.tp = tp;
    options.ep = ep;
    if (!mesh) mesh = programs::mesh_of(options, place.world_size);
    const auto results = train(options, text, *mesh);
    if (place.rank == 0) write_tensors(results, options.export_to + ".results");
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
