// Folders of Hugging Face's transformers (config.json and weights as safetensors) whose
// blocks are those of transformer.h: Llama 2 and 3, Mistral, Mixtral, Qwen2, Qwen3 and
// its mixtures of experts, and what says that it is one of these, such as SmolLM and
// TinyLlama.
//
//   auto config = programs::hugging_face_config(folder);
//   programs::Transformer model(config);   // or deferred, and sharded
//   programs::load_hugging_face(model, folder);
//   ...
//   programs::export_hugging_face(model, config, {.folder = "tuned", .like = folder});
#pragma once

#include "checkpoint/name_map.h"
#include "programs/trainer/hugging_face/hugging_face_config.h"
#include "programs/trainer/model/lora.h"
#include "programs/trainer/model/transformer.h"

#include <string>

namespace programs {

// The Transformer's names, and those of the folder. Each expert of a mixture has names of
// its own there: expert_name().
fsdp::NameMap hugging_face_names(const TransformerConfig& config);
// "block0.mlp.experts.up" and 3: "block0.mlp.experts.3.up.weight", for the names above.
std::string expert_name(const std::string& stacked, int64_t expert);
bool is_of_experts(const std::string& name);

// Fills all parameters but those of adapters. Throws as fsdp::load. Collective over the
// world.
void load_hugging_face(Transformer& model, const TransformerConfig& config,
                       const std::string& folder);

struct ExportOptions {
  std::string folder;  // must not be there
  // The folder that the model came from, whose config.json, dtype, tokenizer and settings
  // of generation stay; empty: it came from none.
  std::string like = {};
};
// What from_pretrained opens; on rank 0 the folder stands when this returns. Collective
// over the world.
void export_hugging_face(Transformer& model, const TransformerConfig& config,
                         const ExportOptions& options);

// The adapters alone, as the Python package peft has them: its PeftModel.from_pretrained
// puts them beside the model of options.like. Collective over the world.
void export_adapters(Transformer& model, const TransformerConfig& config, const LoraOptions& lora,
                     const ExportOptions& options);

}  // namespace programs
