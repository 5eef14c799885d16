#include "programs/trainer/data/tokens.h"

#include "programs/trainer/data/text_data.h"
#include "programs/trainer/data/token_files.h"

#include <algorithm>

namespace programs {

std::unique_ptr<Tokens> tokens_of(const std::string& path, const Tokenizer* tokenizer,
                                  const std::optional<DocumentMarks>& marks) {
  if (TokenFiles::are_at(path)) return std::make_unique<TokenFiles>(path, marks);
  TORCH_CHECK_VALUE(!marks || !marks->end, "--end_of_document: ", *marks->end, ", but ", path,
                    " is text, whose files are its documents");
  return std::make_unique<TextData>(path, *tokenizer);
}

std::vector<int64_t> places_in(const std::vector<int64_t>& sorted, int64_t first, int64_t count) {
  const auto begin = std::lower_bound(sorted.begin(), sorted.end(), first);
  return {begin, std::lower_bound(begin, sorted.end(), first + count)};
}

}  // namespace programs
