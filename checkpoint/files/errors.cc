#include "checkpoint/files/errors.h"

#include "device_mesh/internal/text_of_error.h"

#include <c10/util/Exception.h>

#include <new>
#include <stdexcept>

namespace fsdp::internal::checkpoint {
namespace {

constexpr size_t kNamesShown = 20;

// "[enforce fail at a.cc:1] . it failed" -> "it failed"
void drop_bracket(std::string& text, const std::string& beginning) {
  if (!text.starts_with(beginning)) return;
  const size_t end = text.find(']');
  if (end == std::string::npos) return;
  const size_t first = text.find_first_not_of(" .", end + 1);
  text.erase(0, first == std::string::npos ? text.size() : first);
}

// "x INTERNAL ASSERT FAILED at "a.cpp":1, please report a bug to PyTorch. it failed"
void drop_assertion(std::string& text) {
  constexpr const char* kRequest = "please report a bug to PyTorch.";
  if (text.find("INTERNAL ASSERT FAILED") == std::string::npos) return;
  const size_t request = text.find(kRequest);
  text.erase(0, request == std::string::npos ? text.size()
                                             : request + std::char_traits<char>::length(kRequest));
  text.erase(0, text.find_first_not_of(' '));
}

}  // namespace

void raise_unless_ok(const absl::Status& status) {
  if (status.ok()) return;
  const std::string text(status.message());
  TORCH_CHECK_VALUE(!absl::IsInvalidArgument(status) && !absl::IsAlreadyExists(status), text);
  TORCH_CHECK(false, text);
}

std::string plain_text_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    return "it takes more memory than there is";
  }
  std::string text = text_of(error);
  drop_bracket(text, "[json.exception.");
  drop_bracket(text, "[enforce fail at ");
  drop_assertion(text);
  const bool is_of_library = text.find("_M_") != std::string::npos;  // vector::_M_range_check
  return text.empty() || is_of_library ? "it refers to something that it does not hold" : text;
}

std::string list_of(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kNamesShown; ++i) text += (i ? ", " : "") + names[i];
  if (names.size() > kNamesShown)
    text += " and " + std::to_string(names.size() - kNamesShown) + " more";
  return text;
}

}  // namespace fsdp::internal::checkpoint
