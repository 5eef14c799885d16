// Whether raw access to a storage (data_ptr and the like, past operators) throws.
#pragma once

#include <c10/core/StorageImpl.h>
#include <torch/headeronly/version.h>

#include <string>
#include <utility>

namespace fsdp::internal {

// From now on, with this text.
inline void refuse_raw_access(c10::StorageImpl& storage, std::string text) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(text));
}

// allow_raw_access(storage): from now on it does not throw.
// refuse_raw_access_again(storage, text): as it did before, with text(), which may not be
// asked for.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
// LibTorch can set the flag that makes raw access throw, but not clear it before 2.15.
// Naming a private member in an explicit instantiation is allowed, and gives us a pointer
// to it.
struct ThrowFlag {
  friend constexpr auto member_of(ThrowFlag);
};
template <auto Member>
struct ExposeThrowFlag {
  friend constexpr auto member_of(ThrowFlag) { return Member; }
};
template struct ExposeThrowFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

inline void allow_raw_access(c10::StorageImpl& storage) { storage.*member_of(ThrowFlag{}) = false; }
// With the text that was set last: one is built for each name, not for each time.
template <class Text>
void refuse_raw_access_again(c10::StorageImpl& storage, const Text&) {
  storage.*member_of(ThrowFlag{}) = true;
}
#else
inline void allow_raw_access(c10::StorageImpl& storage) {
  storage.clear_data_ptr_access_error_msg_();
}
template <class Text>
void refuse_raw_access_again(c10::StorageImpl& storage, const Text& text) {
  refuse_raw_access(storage, text());
}
#endif

}  // namespace fsdp::internal
