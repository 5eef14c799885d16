#include "examples/tokens.h"

#include "examples/text_data.h"
#include "examples/token_files.h"

namespace examples {

std::unique_ptr<Tokens> tokens_of(const std::string& path) {
  if (TokenFiles::are_at(path)) return std::make_unique<TokenFiles>(path);
  return std::make_unique<TextData>(path);
}

}  // namespace examples
