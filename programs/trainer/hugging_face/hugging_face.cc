#include "programs/trainer/hugging_face/hugging_face.h"

#include "checkpoint/checkpoint.h"
#include "device_mesh/all_reduce.h"

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

// q_proj for query.
std::vector<std::string> hugging_face_targets(const std::vector<std::string>& targets) {
  std::vector<std::string> names;
  for (const auto& target : targets) {
    for (const char* place : {"attention.", "mlp."}) {
      const auto own = "block0." + std::string(place) + target;
      const auto name = hugging_face_names()(own);
      if (name.ends_with("_proj")) names.push_back(name.substr(name.rfind('.') + 1));
    }
  }
  return names;
}

std::string adapter_config(const LoraOptions& lora, const std::string& like) {
  const nlohmann::ordered_json json = {{"peft_type", "LORA"},
                                       {"task_type", "CAUSAL_LM"},
                                       {"base_model_name_or_path", like},
                                       {"r", lora.rank},
                                       {"lora_alpha", lora.alpha},
                                       {"lora_dropout", 0.0},
                                       {"target_modules", hugging_face_targets(lora.targets)},
                                       {"bias", "none"},
                                       {"inference_mode", true}};
  return json.dump(2) + "\n";
}

// Where an export is written, which a slash at the end must not put within it.
std::string folder_beside(const std::string& folder) {
  return (fs::path(folder) / "").parent_path().string() + ".saving";
}

}  // namespace

fsdp::NameMap hugging_face_names() {
  return {{"embedding", "model.embed_tokens"},
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
}

void load_hugging_face(Transformer& model, const std::string& folder) {
  fsdp::LoadOptions load{.strict = false, .cast = true, .name_in_file = hugging_face_names()};
  if (!adapters_of(model).empty()) load.leave = {kAdapters};
  const auto loaded = fsdp::load({.model = model}, folder, load);
  const bool has_head = !model->head.is_empty();
  auto unexpected = loaded.unexpected;
  std::erase_if(unexpected, [&](const auto& name) { return is_computed(name, has_head); });
  TORCH_CHECK_VALUE(loaded.missing.empty() && unexpected.empty(), folder, ": its weights have not ",
                    "'", c10::Join("', '", loaded.missing),
                    "' of the model, and besides the model's ", "'", c10::Join("', '", unexpected),
                    "'");
}

void export_hugging_face(Transformer& model, const TransformerConfig& config,
                         const ExportOptions& options) {
  check_is_new(options.folder);
  const auto exported = config_for_export(config, options.like);
  const auto saved = folder_beside(options.folder);
  fsdp::save({.model = model}, saved,
             {.layout = fsdp::Layout::kFull,
              .overwrite = true,
              .model_dtype = exported.dtype,
              .name_in_file = hugging_face_names()});
  if (!fsdp::is_rank_zero()) return;
  const auto weights = fs::path(saved) / "model";
  write_text(exported.json, weights / "config.json");
  copy_settings(options.like, weights);
  publish(saved, weights, options.folder);
}

void export_adapters(Transformer& model, const LoraOptions& lora, const ExportOptions& options) {
  check_is_new(options.folder);
  const auto saved = folder_beside(options.folder);
  const auto published = [names = hugging_face_names()](const std::string& name) {
    return "base_model.model." + names(name);
  };
  fsdp::save({.tensors = adapters_of(model)}, saved,
             {.layout = fsdp::Layout::kFull, .overwrite = true, .name_in_file = published});
  if (!fsdp::is_rank_zero()) return;
  const auto weights = fs::path(saved) / "tensors";
  write_text(adapter_config(lora, options.like), weights / "adapter_config.json");
  fs::rename(weights / "model.safetensors", weights / "adapter_model.safetensors");
  publish(saved, weights, options.folder);
}

}  // namespace programs
