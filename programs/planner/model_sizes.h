// The sizes of models that people ask about, without a folder of theirs.
#pragma once

#include "programs/trainer/model/transformer.h"

#include <string>

namespace programs {

// Llama 3.1 as published: "llama-8b", "llama-70b" and "llama-405b". Throws ValueError for
// another name.
TransformerConfig model_called(const std::string& name);

}  // namespace programs
