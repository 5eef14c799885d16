#include "checkpoint/format/catalog/weight_files.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

constexpr std::string_view kIndexEnding = ".index.json";
constexpr std::string_view kDigits = "0123456789";

// "model.fp16-00001-of-00002" -> "model.fp16"
std::string_view without_number(std::string_view stem) {
  constexpr std::string_view kOf = "-of-";
  const size_t of = stem.rfind(kOf);
  if (of == std::string_view::npos) return stem;
  if (stem.find_first_not_of(kDigits, of + kOf.size()) != std::string_view::npos) return stem;
  const size_t dash = stem.substr(0, of).find_last_not_of(kDigits);
  return dash != std::string_view::npos && stem[dash] == '-' ? stem.substr(0, dash) : stem;
}

std::string stem_of(const std::string& name, std::string_view extension) {
  return std::string(
      without_number(std::string_view(name).substr(0, name.size() - extension.size())));
}

// The names that end so and are weights: of .bin files, what is called a model.
std::vector<std::string> files_with(const std::vector<std::string>& names,
                                    std::string_view extension) {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    const bool is_hidden = name.starts_with('.');
    const bool is_model = extension != ".bin" || name.find("model") != std::string::npos;
    if (name.ends_with(extension) && !is_hidden && is_model) found.push_back(name);
  }
  std::sort(found.begin(), found.end());
  return found;
}

// Empty, or the one that `extension` files are named by.
std::string index_of(const std::vector<std::string>& names, std::string_view extension) {
  const auto indices = files_with(names, std::string(extension) + std::string(kIndexEnding));
  if (indices.empty()) return {};
  const std::string usual = "model" + std::string(extension) + std::string(kIndexEnding);
  return std::count(indices.begin(), indices.end(), usual) != 0 ? usual : indices.front();
}

WeightFiles without_variants(const std::vector<std::string>& files, std::string_view extension) {
  std::set<std::string> stems;
  for (const std::string& name : files) stems.insert(stem_of(name, extension));
  WeightFiles found;
  for (const std::string& name : files) {
    const std::string stem = stem_of(name, extension);
    const std::string plain = stem.substr(0, stem.rfind('.'));
    if (plain == stem || stems.count(plain) == 0) {
      found.names.push_back(name);
    } else {
      found.variants.push_back({name, "a variant of '" + plain + std::string(extension) +
                                          "'; it is read where its own path is given"});
    }
  }
  return found;
}

}  // namespace

WeightFiles weight_files(const std::vector<std::string>& names) {
  for (const std::string_view extension : {".safetensors", ".bin"}) {
    if (auto index = index_of(names, extension); !index.empty()) return {.index = std::move(index)};
    WeightFiles found = without_variants(files_with(names, extension), extension);
    if (!found.names.empty()) return found;
  }
  return {};
}

}  // namespace fsdp::internal::checkpoint
