// Patterns of names: dotted paths of parameters, or of modules with all that is below
// them, in which a '*' stands for any part of one name. No torch here.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace fsdp::internal {

// What a pattern means in a name.
struct NameMatch {
  std::vector<std::string_view> stars;  // what each '*' stands for
  std::string_view below;               // what comes after: "" or ".weight"
};

// The match with the shortest stars, the first ones before the others; nothing: the
// pattern does not mean the name. Its views are of `name`.
std::optional<NameMatch> match_name(std::string_view pattern, std::string_view name);

// Whether the pattern means `name` itself, not only something above it.
bool is_match(std::string_view pattern, std::string_view name);

}  // namespace fsdp::internal
