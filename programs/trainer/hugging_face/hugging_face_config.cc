#include "programs/trainer/hugging_face/hugging_face_config.h"

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace programs {
namespace {

using Json = nlohmann::ordered_json;

// By model_type.
const std::map<std::string, std::string> kArchitectures = {
    {"llama", "LlamaForCausalLM"},     {"mistral", "MistralForCausalLM"},
    {"mixtral", "MixtralForCausalLM"}, {"qwen2", "Qwen2ForCausalLM"},
    {"qwen3", "Qwen3ForCausalLM"},     {"qwen3_moe", "Qwen3MoeForCausalLM"}};

// Fields that do not change what is computed from tokens, or that the sizes imply.
const std::set<std::string> kOfNoConsequence = {
    "bos_token_id",         "dtype",          "eos_token_id",       "id2label",
    "initializer_range",    "label2id",       "layer_types",        "max_window_layers",
    "pad_token_id",         "pretraining_tp", "return_dict",        "torch_dtype",
    "transformers_version", "use_cache",      "use_sliding_window", "router_aux_loss_coef"};

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

std::string config_path(const std::string& folder) {
  return std::filesystem::path(folder) / "config.json";
}

Json read_json(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK_VALUE(file.is_open(), path, ": no such file");
  Json json;
  try {
    json = Json::parse(file);
  } catch (const Json::exception& error) {
    TORCH_CHECK_VALUE(false, path, ": ", error.what());
  }
  TORCH_CHECK_VALUE(json.is_object(), path, ": expected a JSON object");
  return json;
}

std::string model_type(Fields& fields) {
  const auto type = fields.get<std::string>("model_type");
  const auto found = kArchitectures.find(type);
  TORCH_CHECK_VALUE(found != kArchitectures.end(), fields.path(), ": model_type is \"", type,
                    "\", allowed are llama, mistral, mixtral, qwen2, qwen3 and qwen3_moe");
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

// Of models whose blocks are all of one kind.
MixtureConfig mixture_from(Fields& fields, const std::string& type) {
  if (type == "mixtral") {
    fields.expect("router_jitter_noise", 0.0);
    fields.expect("output_router_logits", false);
    return {.experts = fields.get<int64_t>("num_local_experts"),
            .per_token = fields.get<int64_t>("num_experts_per_tok")};
  }
  if (type != "qwen3_moe") return {};
  fields.expect("output_router_logits", false);
  fields.expect("decoder_sparse_step", 1);
  fields.expect("mlp_only_layers", Json::array());
  return {.experts = fields.get<int64_t>("num_experts"),
          .per_token = fields.get<int64_t>("num_experts_per_tok"),
          .hidden = fields.get<int64_t>("moe_intermediate_size"),
          .sums_to_one = fields.get<bool>("norm_topk_prob", false)};
}

c10::ScalarType dtype_in(const Json& config, const std::string& path) {
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

std::string type_of(const TransformerConfig& config) {
  if (config.mixture.experts > 0) return config.qk_norm ? "qwen3_moe" : "mixtral";
  if (config.qk_norm) return "qwen3";
  return config.qkv_bias ? "qwen2" : "llama";
}

Json config_of(const TransformerConfig& config) {
  const auto type = type_of(config);
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
  if (const auto& mixture = config.mixture; mixture.experts > 0) {
    json["num_experts_per_tok"] = mixture.per_token;
    json[config.qk_norm ? "num_experts" : "num_local_experts"] = mixture.experts;
    json["moe_intermediate_size"] = mixture.hidden;
    json["norm_topk_prob"] = mixture.sums_to_one;
    if (!config.qk_norm) json["intermediate_size"] = mixture.hidden;
  }
  if (const auto& scaling = config.rotary_scaling)
    json["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", scaling->factor},
                            {"low_freq_factor", scaling->low},
                            {"high_freq_factor", scaling->high},
                            {"original_max_position_embeddings", scaling->original_max_tokens}};
  return json;
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
  config.qk_norm = type == "qwen3" || type == "qwen3_moe";
  config.mixture = mixture_from(fields, type);
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
    config = checked(config);
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, fields.path(), ": ", error.what_without_backtrace());
  }
  return config;
}

ExportedConfig config_for_export(const TransformerConfig& config, const std::string& like) {
  const auto path = like.empty() ? "" : config_path(like);
  const auto json = like.empty() ? config_of(checked(config)) : read_json(path);
  return {json.dump(2) + "\n", dtype_in(json, path)};
}

}  // namespace programs
