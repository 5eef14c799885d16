// Registries that keep nothing alive: of objects by key, as long as somebody holds them,
// and of what is known about an object, as long as it lives.
//
//   static auto& runtimes = *new WeakRegistry<int, Runtime>();
//   auto runtime = runtimes.find_or_make(1, [] { return std::make_shared<Runtime>(); });
//
//   static auto& names = *new WeakKeyMap<std::weak_ptr<Module>, std::string>();
//   names.with(module, [](std::string& name) { name = "encoder"; });
//   names.find(module);  // "encoder"; nothing for a module without one
//
// Static ones are leaked, as here: tensors and process groups may die after static
// destruction began. Thread-safe. A call costs a lock and a search in a std::map. What
// has died is forgotten when something is added: each time while the entries are few,
// else once they are twice as many as lived the last time.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace fsdp::internal {

// Entries that expire by themselves. REQUIRES: one thread at a time.
template <class Key, class Entry>
class ExpiringEntries {
 public:
  using Map = std::map<Key, Entry>;

  // Null for none that lives.
  Entry* find(const Key& key) {
    const auto found = entries_.find(key);
    return found == entries_.end() || found->second.expired() ? nullptr : &found->second;
  }
  // REQUIRES: none lives. What has expired may go to `removed`.
  template <class Argument>
  Entry& add(const Key& key, const Argument& argument, Map& removed) {
    if (entries_.size() <= kFew || entries_.size() >= sweep_at_) sweep(removed);
    if (auto before = entries_.extract(key)) removed.insert(std::move(before));
    return entries_.try_emplace(key, argument).first->second;
  }
  void sweep(Map& removed) {
    for (auto next = entries_.begin(); next != entries_.end();) {
      const auto each = next++;
      if (each->second.expired()) removed.insert(entries_.extract(each));
    }
    sweep_at_ = 2 * entries_.size();
  }

 private:
  static constexpr size_t kFew = 256;
  Map entries_;
  size_t sweep_at_ = 0;
};

// One object per key, as long as somebody holds it. A key that is an address is that of
// something which the object keeps alive.
template <class Key, class T>
class WeakRegistry {
 public:
  // Null where nobody holds one.
  std::shared_ptr<T> find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto* const known = entries_.find(key);
    return known == nullptr ? nullptr : known->lock();
  }
  // make() runs under the lock: it must not wait for other threads or use this
  // registry.
  template <class Make>
  std::shared_ptr<T> find_or_make(const Key& key, const Make& make) {
    const std::lock_guard lock(mutex_);
    const auto* const known = entries_.find(key);
    std::shared_ptr<T> object = known == nullptr ? nullptr : known->lock();
    typename decltype(entries_)::Map removed;
    if (object == nullptr) entries_.add(key, object = make(), removed);
    return object;
  }

 private:
  std::mutex mutex_;
  ExpiringEntries<Key, std::weak_ptr<T>> entries_;
};

// A value for each object, as long as the object lives. Found by the object's address,
// but an object in the place of a dead one does not get its value. Weak is a weak pointer
// to the objects, std::weak_ptr or c10::weak_intrusive_ptr, and `owner` a strong one. The
// values of dead objects are destroyed at an addition or sweep(), without the lock.
template <class Weak, class T>
class WeakKeyMap {
 public:
  // A copy; nothing for an object without a value.
  template <class Owner>
  std::optional<T> find(const Owner& owner) {
    const std::lock_guard lock(mutex_);
    const auto* const known = entries_.find(owner.get());
    return known == nullptr ? std::nullopt : std::optional<T>(known->value);
  }
  // Gives what use(value) gives, which runs under the lock. The value is T() the first
  // time, and stays where it is as long as the object lives.
  template <class Owner, class Use>
  decltype(auto) with(const Owner& owner, const Use& use) {
    typename Entries::Map removed;
    const std::lock_guard lock(mutex_);
    auto* const known = entries_.find(owner.get());
    return use((known == nullptr ? entries_.add(owner.get(), owner, removed) : *known).value);
  }
  void sweep() {
    typename Entries::Map removed;
    const std::lock_guard lock(mutex_);
    entries_.sweep(removed);
  }

 private:
  struct Entry {
    template <class Owner>
    explicit Entry(const Owner& of) : owner(of) {}
    bool expired() const { return owner.expired(); }
    Weak owner;
    T value = T();
  };
  using Entries = ExpiringEntries<const void*, Entry>;

  std::mutex mutex_;
  Entries entries_;
};

}  // namespace fsdp::internal
