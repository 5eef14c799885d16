#include "programs/trainer/hugging_face/hugging_face.h"

#include "checkpoint/checkpoint.h"
#include "device_mesh/all_reduce.h"
#include "dtensor/dtensor.h"

#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <vector>

namespace programs {
namespace {

namespace fs = std::filesystem;

// As a pattern of NameMap's.
constexpr const char* kAdapters = "block*.*.*.lora_*";

// Beside the weights.
constexpr const char* kCopied[] = {
    "added_tokens.json", "chat_template.jinja",     "generation_config.json",
    "merges.txt",        "special_tokens_map.json", "tokenizer.json",
    "tokenizer.model",   "tokenizer_config.json",   "vocab.json"};

// What may lie in a folder beside the parameters: angles that old versions saved, and the
// head that is the embedding.
bool is_computed(const std::string& name, bool has_head) {
  return name.ends_with(".rotary_emb.inv_freq") || (!has_head && name == "lm_head.weight");
}

void write_text(const std::string& text, const std::string& path) {
  std::ofstream file(path);
  file << text;
  file.close();
  TORCH_CHECK(file.good(), path, ": could not be written");
}

// By their names in the model.
std::map<std::string, torch::Tensor> adapters_of(Transformer& model) {
  std::map<std::string, torch::Tensor> adapters;
  for (const auto& parameter : model->named_parameters())
    if (parameter.key().find(".lora_") != std::string::npos)
      adapters.emplace(parameter.key(), parameter.value());
  return adapters;
}

void copy_settings(const std::string& like, const fs::path& to) {
  if (like.empty()) return;
  for (const char* name : kCopied)
    if (fs::exists(fs::path(like) / name)) fs::copy_file(fs::path(like) / name, to / name);
}

// A folder of what was saved becomes `folder`, at once.
void publish(const fs::path& saved, const fs::path& part, const std::string& folder) {
  fs::rename(part, folder);
  // Not remove_all(), which LibTorch exports broken: the manifest is all that is left.
  for (const auto& left : fs::directory_iterator(saved)) fs::remove(left.path());
  fs::remove(saved);
}

void check_is_new(const std::string& folder) {
  TORCH_CHECK_VALUE(!fs::exists(folder), "export: '", folder, "' is there already");
}

// Of mixtures, beside what dense models have.
const std::vector<fsdp::NameMap::Entry> kOfMixtral = {
    {"block*.mlp.router", "model.layers.*.block_sparse_moe.gate"},
    {"block*.mlp.experts.*", "model.layers.*.block_sparse_moe.experts.*"},
    {"block*.mlp.experts.*.gate", "model.layers.*.block_sparse_moe.experts.*.w1"},
    {"block*.mlp.experts.*.up", "model.layers.*.block_sparse_moe.experts.*.w3"},
    {"block*.mlp.experts.*.down", "model.layers.*.block_sparse_moe.experts.*.w2"}};
const std::vector<fsdp::NameMap::Entry> kOfQwen3 = {
    {"block*.attention.query_norm", "model.layers.*.self_attn.q_norm"},
    {"block*.attention.key_norm", "model.layers.*.self_attn.k_norm"},
    {"block*.mlp.router", "model.layers.*.mlp.gate"},
    {"block*.mlp.experts.*.gate", "model.layers.*.mlp.experts.*.gate_proj"},
    {"block*.mlp.experts.*.up", "model.layers.*.mlp.experts.*.up_proj"},
    {"block*.mlp.experts.*.down", "model.layers.*.mlp.experts.*.down_proj"}};

using NamedTensors = std::map<std::string, torch::Tensor>;

// The parameters of which each has a part of all experts of a block.
NamedTensors stacked_experts(Transformer& model) {
  NamedTensors stacked;
  for (const auto& parameter : model->named_parameters())
    if (is_of_experts(parameter.key())) stacked.emplace(parameter.key(), parameter.value());
  return stacked;
}

bool is_expert_in_folder(const std::string& name) {
  return name.find(".experts.") != std::string::npos;
}

// This rank's part of what is as long as `stacked` in its first dimension, and lies as
// it.
torch::Tensor part_as(const torch::Tensor& stacked, const torch::Tensor& values) {
  if (!fsdp::is_dtensor(stacked)) return values;
  const fsdp::DTensor placed(stacked);
  return fsdp::distribute_tensor(values, placed.device_mesh(), placed.placements()).to_local();
}

// Which experts this rank has.
std::vector<int64_t> experts_here(const torch::Tensor& stacked) {
  const auto numbers = part_as(stacked, torch::arange(stacked.size(0)));
  const auto* const first = numbers.const_data_ptr<int64_t>();
  return {first, first + numbers.numel()};
}

torch::Tensor local_of(const torch::Tensor& tensor) {
  return fsdp::is_dtensor(tensor) ? fsdp::DTensor(tensor).to_local() : tensor;
}

// Each rank reads its own experts.
void load_experts(const NamedTensors& stacked, const fsdp::NameMap& names,
                  const std::string& folder) {
  const torch::NoGradGuard no_grad;
  NamedTensors read, rows;
  for (const auto& [name, tensor] : stacked) {
    const auto part = read.emplace(name, torch::empty_like(local_of(tensor))).first->second;
    const auto experts = experts_here(tensor);
    for (size_t i = 0; i < experts.size(); ++i)
      rows.emplace(expert_name(name, experts[i]), part[static_cast<int64_t>(i)]);
  }
  const auto loaded =
      fsdp::load({.tensors = rows}, folder, {.strict = false, .cast = true, .name_in_file = names});
  TORCH_CHECK_VALUE(loaded.missing.empty(), folder, ": its weights have not '",
                    c10::Join("', '", loaded.missing), "' of the model");
  for (const auto& [name, tensor] : stacked) {
    if (!fsdp::is_dtensor(tensor)) {
      torch::Tensor(tensor).copy_(read.at(name));
      continue;
    }
    const fsdp::DTensor placed(tensor);
    torch::Tensor(tensor).copy_(fsdp::from_local(
        read.at(name), placed.device_mesh(), placed.placements(), {.shape = tensor.sizes().vec()}));
  }
}

// As the ranks have it: whole on the one that has the expert, whose number is `owner` in
// the mesh.
torch::Tensor one_expert(const torch::Tensor& stacked, const torch::Tensor& row, int64_t owner) {
  const fsdp::DTensor placed(stacked);
  const auto& mesh = placed.device_mesh();
  std::vector<fsdp::Placement> placements;
  for (int64_t dim = mesh.ndim() - 1; dim >= 0; --dim) {
    const auto coordinate = owner % mesh.size(dim);
    owner /= mesh.size(dim);
    const bool is_cut = placed.placements()[static_cast<size_t>(dim)].is_shard();
    placements.insert(placements.begin(), is_cut ? fsdp::Placement(fsdp::Owned{coordinate})
                                                 : fsdp::Placement(fsdp::Replicate{}));
  }
  return fsdp::from_local(row, mesh, placements, {.shape = stacked.sizes().slice(1).vec()});
}

// Where each rank stands in the mesh, row-major.
int64_t place_in(const fsdp::DeviceMesh& mesh) {
  int64_t place = 0;
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim)
    place = place * mesh.size(dim) + mesh.local_rank(dim);
  return place;
}

// Collective over the mesh of `stacked`.
void unstack(const std::string& name, const torch::Tensor& stacked, c10::ScalarType dtype,
             NamedTensors& into) {
  const auto local = local_of(stacked).detach().to(dtype);
  if (!fsdp::is_dtensor(stacked)) {
    for (int64_t i = 0; i < local.size(0); ++i) into.emplace(expert_name(name, i), local[i]);
    return;
  }
  const fsdp::DTensor placed(stacked);
  const auto& mesh = placed.device_mesh();
  const auto here = experts_here(stacked);
  const auto owner = fsdp::full_tensor(
      fsdp::from_local(torch::full({static_cast<int64_t>(here.size())}, place_in(mesh)), mesh,
                       placed.placements(), {.shape = std::vector{stacked.size(0)}}));
  for (int64_t expert = 0; expert < stacked.size(0); ++expert) {
    const auto at = std::find(here.begin(), here.end(), expert);
    auto shape = stacked.sizes().slice(1).vec();
    if (at == here.end()) shape.front() = 0;
    const auto row =
        at == here.end() ? torch::empty(shape, local.options()) : local[at - here.begin()];
    into.emplace(expert_name(name, expert),
                 one_expert(stacked, row, owner[expert].item<int64_t>()));
  }
}

// q_proj for query.
std::vector<std::string> hugging_face_targets(const std::vector<std::string>& targets,
                                              const TransformerConfig& config) {
  std::vector<std::string> names;
  for (const auto& target : targets) {
    for (const char* place : {"attention.", "mlp."}) {
      const auto own = "block0." + std::string(place) + target;
      const auto name = hugging_face_names(config)(own);
      if (name.ends_with("_proj")) names.push_back(name.substr(name.rfind('.') + 1));
    }
  }
  return names;
}

std::string adapter_config(const LoraOptions& lora, const TransformerConfig& config,
                           const std::string& like) {
  const nlohmann::ordered_json json = {
      {"peft_type", "LORA"},
      {"task_type", "CAUSAL_LM"},
      {"base_model_name_or_path", like},
      {"r", lora.rank},
      {"lora_alpha", lora.alpha},
      {"lora_dropout", 0.0},
      {"target_modules", hugging_face_targets(lora.targets, config)},
      {"bias", "none"},
      {"inference_mode", true}};
  return json.dump(2) + "\n";
}

// All parameters, each expert by itself, in `dtype`. Collective over the world.
NamedTensors unstacked(Transformer& model, c10::ScalarType dtype) {
  const torch::NoGradGuard no_grad;
  NamedTensors all;
  for (const auto& parameter : model->named_parameters()) {
    if (is_of_experts(parameter.key())) {
      unstack(parameter.key(), parameter.value(), dtype, all);
    } else {
      all.emplace(parameter.key(), parameter.value().detach().to(dtype));
    }
  }
  return all;
}

// Where an export is written, which a slash at the end must not put within it.
std::string folder_beside(const std::string& folder) {
  return (fs::path(folder) / "").parent_path().string() + ".saving";
}

}  // namespace

std::string expert_name(const std::string& stacked, int64_t expert) {
  const auto leaf = stacked.rfind('.');
  return c10::str(stacked.substr(0, leaf + 1), expert, stacked.substr(leaf), ".weight");
}

bool is_of_experts(const std::string& name) {
  return name.find(".mlp.experts.") != std::string::npos;
}

fsdp::NameMap hugging_face_names(const TransformerConfig& config) {
  std::vector<fsdp::NameMap::Entry> names = {
      {"embedding", "model.embed_tokens"},
      {"block*", "model.layers.*"},
      {"block*.attention_norm", "model.layers.*.input_layernorm"},
      {"block*.attention.query", "model.layers.*.self_attn.q_proj"},
      {"block*.attention.key", "model.layers.*.self_attn.k_proj"},
      {"block*.attention.value", "model.layers.*.self_attn.v_proj"},
      {"block*.attention.output", "model.layers.*.self_attn.o_proj"},
      {"block*.mlp_norm", "model.layers.*.post_attention_layernorm"},
      {"block*.mlp.gate", "model.layers.*.mlp.gate_proj"},
      {"block*.mlp.up", "model.layers.*.mlp.up_proj"},
      {"block*.mlp.down", "model.layers.*.mlp.down_proj"},
      {"norm", "model.norm"},
      {"head", "lm_head"}};
  const auto experts = config.qk_norm ? kOfQwen3 : kOfMixtral;
  names.insert(names.end(), experts.begin(), experts.end());
  return fsdp::NameMap(std::move(names));
}

void load_hugging_face(Transformer& model, const TransformerConfig& config,
                       const std::string& folder) {
  const auto names = hugging_face_names(config);
  fsdp::LoadOptions load{.strict = false, .cast = true, .name_in_file = names};
  if (!adapters_of(model).empty()) load.leave.emplace_back(kAdapters);
  const auto stacked = stacked_experts(model);
  if (!stacked.empty()) load.leave.emplace_back("block*.mlp.experts");
  const auto loaded = fsdp::load({.model = model}, folder, load);
  const bool has_head = !model->head.is_empty();
  auto unexpected = loaded.unexpected;
  std::erase_if(unexpected, [&](const auto& name) {
    return is_computed(name, has_head) || (!stacked.empty() && is_expert_in_folder(name));
  });
  TORCH_CHECK_VALUE(loaded.missing.empty() && unexpected.empty(), folder, ": its weights have not ",
                    "'", c10::Join("', '", loaded.missing),
                    "' of the model, and besides the model's ", "'", c10::Join("', '", unexpected),
                    "'");
  if (!stacked.empty()) load_experts(stacked, names, folder);
}

void export_hugging_face(Transformer& model, const TransformerConfig& config,
                         const ExportOptions& options) {
  check_is_new(options.folder);
  const auto exported = config_for_export(config, options.like);
  const auto saved = folder_beside(options.folder);
  fsdp::SaveOptions save{
      .layout = fsdp::Layout::kFull, .overwrite = true, .name_in_file = hugging_face_names(config)};
  const bool has_experts = config.mixture.experts > 0;
  if (has_experts) {
    fsdp::save({.tensors = unstacked(model, exported.dtype)}, saved, save);
  } else {
    save.model_dtype = exported.dtype;
    fsdp::save({.model = model}, saved, save);
  }
  if (!fsdp::is_rank_zero()) return;
  const auto weights = fs::path(saved) / (has_experts ? "tensors" : "model");
  write_text(exported.json, weights / "config.json");
  copy_settings(options.like, weights);
  publish(saved, weights, options.folder);
}

void export_adapters(Transformer& model, const TransformerConfig& config, const LoraOptions& lora,
                     const ExportOptions& options) {
  check_is_new(options.folder);
  const auto saved = folder_beside(options.folder);
  const auto published = [names = hugging_face_names(config)](const std::string& name) {
    return "base_model.model." + names(name);
  };
  fsdp::save({.tensors = adapters_of(model)}, saved,
             {.layout = fsdp::Layout::kFull, .overwrite = true, .name_in_file = published});
  if (!fsdp::is_rank_zero()) return;
  const auto weights = fs::path(saved) / "tensors";
  write_text(adapter_config(lora, config, options.like), weights / "adapter_config.json");
  fs::rename(weights / "model.safetensors", weights / "adapter_model.safetensors");
  publish(saved, weights, options.folder);
}

}  // namespace programs
