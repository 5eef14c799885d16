// The config.json of a folder of Hugging Face's transformers, as the Transformer's sizes
// and back (hugging_face.h).
#pragma once

#include "programs/trainer/model/transformer.h"

#include <c10/core/ScalarType.h>

#include <string>

namespace programs {

// What config.json says; max_tokens: as many as the model was made for. Throws ValueError
// that names the file, the field and what is allowed, for other architectures and for
// fields that would make the model compute something else, or that are not known. Local.
TransformerConfig hugging_face_config(const std::string& folder);

// For a folder that is to be written: the config.json of the folder `like`, where there
// is one, and else what says `config`; and the dtype that it names for the weights.
struct ExportedConfig {
  std::string json;
  c10::ScalarType dtype;
};
ExportedConfig config_for_export(const TransformerConfig& config, const std::string& like);

}  // namespace programs
