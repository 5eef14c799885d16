#include "examples/hugging_face.h"

#include "checkpoint/checkpoint.h"
#include "device_mesh/all_reduce.h"

#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace examples {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// By model_type.
const std::map<std::string, std::string> kArchitectures = {{"llama", "LlamaForCausalLM"},
                                                           {"mistral", "MistralForCausalLM"},
                                                           {"qwen2", "Qwen2ForCausalLM"}};

// Fields that do not change what is computed from tokens, or that the sizes imply.
const std::set<std::string> kOfNoConsequence = {
    "bos_token_id", "dtype",       "eos_token_id",         "id2label",     "initializer_range",
    "label2id",     "layer_types", "max_window_layers",    "pad_token_id", "pretraining_tp",
    "return_dict",  "torch_dtype", "transformers_version", "use_cache",    "use_sliding_window"};

// As a pattern of NameMap's.
constexpr const char* kAdapters = "block*.*.*.lora_*";

// Beside the weights.
constexpr const char* kCopied[] = {
    "added_tokens.json", "chat_template.jinja",     "generation_config.json",
    "merges.txt",        "special_tokens_map.json", "tokenizer.json",
    "tokenizer.model",   "tokenizer_config.json",   "vocab.json"};

// Of a config.json, or of an object in it: each field is asked for by name, and what was
// not is found at the end.
class Fields {
 public:
  Fields(std::string path, Json fields) : path_(std::move(path)), fields_(std::move(fields)) {}

  bool has(const std::string& name) {
    known_.insert(name);
    return fields_.contains(name) && !fields_.at(name).is_null();
  }
  template <class T>
  T get(const std::string& name) {
    TORCH_CHECK_VALUE(has(name), path_, ": no field '", name, "'");
    try {
      return fields_.at(name).template get<T>();
    } catch (const Json::exception&) {
      TORCH_CHECK_VALUE(false, path_, ": field '", name, "' is ", fields_.at(name).dump(),
                        ", which is of another type than expected");
    }
  }
  template <class T>
  T get(const std::string& name, const T& if_absent) {
    return has(name) ? get<T>(name) : if_absent;
  }
  Fields object(const std::string& name) {
    const auto object = get<Json>(name);
    TORCH_CHECK_VALUE(object.is_object(), path_, ": field '", name, "' is ", object.dump(),
                      ", expected an object");
    return {path_ + ": " + name, object};
  }
  template <class T>
  void expect(const std::string& name, const T& allowed) {
    const auto value = get<T>(name, allowed);
    TORCH_CHECK_VALUE(value == allowed, path_, ": ", name, " is ", Json(value).dump(),
                      ", allowed is ", Json(allowed).dump());
  }
  // What is null, false or 0 is switched off.
  void expect_no_others() const {
    for (const auto& [name, value] : fields_.items()) {
      const bool is_off = value.is_null() || value == false || value == 0;
      TORCH_CHECK_VALUE(is_off || name.starts_with('_') || known_.count(name) != 0 ||
                            kOfNoConsequence.count(name) != 0,
                        path_, ": field '", name, "' (", value.dump(),
                        ") is not known, and might change what the model computes");
    }
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  Json fields_;
  std::set<std::string> known_;
};

std::string config_path(const std::string& folder) { return (fs::path(folder) / "config.json"); }

Json read_json(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK_VALUE(file.is_open(), path, ": no such file");
  try {
    auto json = Json::parse(file);
    TORCH_CHECK_VALUE(json.is_object(), path, ": expected a JSON object");
    return json;
  } catch (const Json::exception& error) {
    TORCH_CHECK_VALUE(false, path, ": ", error.what());
  }
}

std::string model_type(Fields& fields) {
  const auto type = fields.get<std::string>("model_type");
  const auto found = kArchitectures.find(type);
  TORCH_CHECK_VALUE(found != kArchitectures.end(), fields.path(), ": model_type is \"", type,
                    "\", allowed are llama, mistral and qwen2");
  const auto& expected = found->second;
  const auto architectures = fields.get<std::vector<std::string>>("architectures", {expected});
  TORCH_CHECK_VALUE(architectures == std::vector{expected}, fields.path(), ": architectures is ",
                    Json(architectures).dump(), ", allowed is [\"", expected, "\"]");
  return type;
}

std::optional<RotaryScaling> scaling_from(Fields fields) {
  const auto type = fields.get<std::string>(fields.has("rope_type") ? "rope_type" : "type");
  fields.get<std::string>("type", "");  // an older name for it, which may be there too
  TORCH_CHECK_VALUE(type == "default" || type == "llama3", fields.path(), ": rope_type is \"", type,
                    "\", allowed are default and llama3");
  fields.get<double>("rope_theta", 0);
  std::optional<RotaryScaling> scaling;
  if (type == "llama3")
    scaling = {.factor = fields.get<double>("factor"),
               .low = fields.get<double>("low_freq_factor"),
               .high = fields.get<double>("high_freq_factor"),
               .original_max_tokens = fields.get<int64_t>("original_max_position_embeddings")};
  fields.expect_no_others();
  return scaling;
}

// Of version 5, rope_parameters; before, rope_theta and rope_scaling.
void read_rotation(Fields& fields, TransformerConfig& config) {
  config.rotary_base = fields.get<double>("rope_theta", config.rotary_base);
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    if (!fields.has(name)) continue;
    auto parameters = fields.object(name);
    config.rotary_base = parameters.get<double>("rope_theta", config.rotary_base);
    config.rotary_scaling = scaling_from(fields.object(name));
  }
}

// Texts no longer than the window are computed alike without it.
void read_longest(Fields& fields, TransformerConfig& config) {
  config.max_tokens = fields.get<int64_t>("max_position_embeddings");
  config.max_tokens =
      std::min(config.max_tokens, fields.get<int64_t>("sliding_window", config.max_tokens));
}

std::optional<c10::ScalarType> dtype_in(const Json& config, const std::string& path) {
  for (const char* field : {"dtype", "torch_dtype"}) {
    if (!config.contains(field) || config.at(field).is_null()) continue;
    const auto name = config.at(field).get<std::string>();
    if (name == "bfloat16") return torch::kBFloat16;
    if (name == "float16") return torch::kHalf;
    TORCH_CHECK_VALUE(name == "float32", path, ": ", field, " is \"", name,
                      "\", allowed are bfloat16, float16 and float32");
  }
  return torch::kFloat;
}

Json config_of(const TransformerConfig& config) {
  const std::string type = config.qkv_bias ? "qwen2" : "llama";
  Json json = {{"architectures", Json::array({kArchitectures.at(type)})},
               {"model_type", type},
               {"vocab_size", config.vocab},
               {"hidden_size", config.width},
               {"intermediate_size", config.mlp_width},
               {"num_hidden_layers", config.blocks},
               {"num_attention_heads", config.heads},
               {"num_key_value_heads", config.kv_heads},
               {"head_dim", config.head_width},
               {"hidden_act", "silu"},
               {"max_position_embeddings", config.max_tokens},
               {"rms_norm_eps", config.norm_epsilon},
               {"rope_theta", config.rotary_base},
               {"tie_word_embeddings", config.tied_head},
               {"torch_dtype", "float32"}};
  if (const auto& scaling = config.rotary_scaling)
    json["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", scaling->factor},
                            {"low_freq_factor", scaling->low},
                            {"high_freq_factor", scaling->high},
                            {"original_max_position_embeddings", scaling->original_max_tokens}};
  return json;
}

// What may lie in a folder beside the parameters: angles that old versions saved, and the
// head that is the embedding.
bool is_computed(const std::string& name, bool has_head) {
  return name.ends_with(".rotary_emb.inv_freq") || (!has_head && name == "lm_head.weight");
}

void write_config(const Json& config, const std::string& path) {
  std::ofstream file(path);
  file << config.dump(2) << "\n";
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

Json adapter_config(const LoraOptions& lora, const std::string& like) {
  return {{"peft_type", "LORA"},
          {"task_type", "CAUSAL_LM"},
          {"base_model_name_or_path", like},
          {"r", lora.rank},
          {"lora_alpha", lora.alpha},
          {"lora_dropout", 0.0},
          {"target_modules", hugging_face_targets(lora.targets)},
          {"bias", "none"},
          {"inference_mode", true}};
}

}  // namespace

TransformerConfig hugging_face_config(const std::string& folder) {
  Fields fields(config_path(folder), read_json(config_path(folder)));
  const auto type = model_type(fields);
  TransformerConfig config{.vocab = fields.get<int64_t>("vocab_size"),
                           .width = fields.get<int64_t>("hidden_size"),
                           .blocks = fields.get<int64_t>("num_hidden_layers"),
                           .heads = fields.get<int64_t>("num_attention_heads")};
  config.kv_heads = type == "llama" ? fields.get<int64_t>("num_key_value_heads", config.heads)
                                    : fields.get<int64_t>("num_key_value_heads");
  config.head_width = fields.get<int64_t>("head_dim", 0);
  config.mlp_width = fields.get<int64_t>("intermediate_size");
  config.qkv_bias = type == "qwen2";
  config.tied_head = fields.get<bool>("tie_word_embeddings", false);
  config.norm_epsilon = fields.get<double>("rms_norm_eps", 1e-6);
  read_rotation(fields, config);
  read_longest(fields, config);
  fields.expect<std::string>("hidden_act", "silu");
  fields.expect("attention_dropout", 0.0);
  fields.expect("attention_bias", false);
  fields.expect("mlp_bias", false);
  fields.expect("partial_rotary_factor", 1.0);
  fields.expect_no_others();
  try {
    return checked(config);
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, fields.path(), ": ", error.what_without_backtrace());
  }
}

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
  const auto like =
      options.like.empty() ? config_of(checked(config)) : read_json(config_path(options.like));
  const auto saved = options.folder + ".saving";
  fsdp::save({.model = model}, saved,
             {.layout = fsdp::Layout::kFull,
              .overwrite = true,
              .model_dtype = dtype_in(like, config_path(options.like)),
              .name_in_file = hugging_face_names()});
  if (!fsdp::is_rank_zero()) return;
  const auto weights = fs::path(saved) / "model";
  write_config(like, config_path(weights));
  copy_settings(options.like, weights);
  publish(saved, weights, options.folder);
}

void export_adapters(Transformer& model, const LoraOptions& lora, const ExportOptions& options) {
  check_is_new(options.folder);
  const auto saved = options.folder + ".saving";
  const auto published = [names = hugging_face_names()](const std::string& name) {
    return "base_model.model." + names(name);
  };
  fsdp::save({.tensors = adapters_of(model)}, saved,
             {.layout = fsdp::Layout::kFull, .overwrite = true, .name_in_file = published});
  if (!fsdp::is_rank_zero()) return;
  const auto weights = fs::path(saved) / "tensors";
  write_config(adapter_config(lora, options.like), weights / "adapter_config.json");
  fs::rename(weights / "model.safetensors", weights / "adapter_model.safetensors");
  publish(saved, weights, options.folder);
}

}  // namespace examples
