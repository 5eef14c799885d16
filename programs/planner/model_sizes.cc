#include "programs/planner/model_sizes.h"

#include <map>

namespace programs {
namespace {

TransformerConfig llama(int64_t width, int64_t blocks, int64_t heads, int64_t mlp_width) {
  return {.vocab = 128256,
          .width = width,
          .blocks = blocks,
          .heads = heads,
          .kv_heads = 8,
          .max_tokens = 131072,
          .mlp_width = mlp_width,
          .rotary_base = 500000,
          .rotary_scaling = RotaryScaling()};
}

}  // namespace

TransformerConfig model_called(const std::string& name) {
  const std::map<std::string, TransformerConfig> models = {
      {"llama-8b", llama(4096, 32, 32, 14336)},
      {"llama-70b", llama(8192, 80, 64, 28672)},
      {"llama-405b", llama(16384, 126, 128, 53248)}};
  const auto found = models.find(name);
  TORCH_CHECK_VALUE(found != models.end(), "--config: ", name,
                    ", allowed are llama-8b, llama-70b, llama-405b and a folder with a "
                    "config.json");
  return found->second;
}

}  // namespace programs
