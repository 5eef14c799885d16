#include "device_mesh/internal/weak_registry.h"

#include <c10/util/intrusive_ptr.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::internal {
namespace {

using Objects = WeakRegistry<std::string, int>;
using Names = WeakKeyMap<std::weak_ptr<int>, std::string>;

constexpr int kMany = 2000;  // more than "few"

std::shared_ptr<int> object(int number) { return std::make_shared<int>(number); }

void give_name(Names& names, const std::shared_ptr<int>& object, const std::string& text) {
  names.with(object, [&](std::string& name) { name = text; });
}

// All of them lie at the same address, one after another.
std::shared_ptr<int> object_at(int* address) {
  return {address, [](int*) {}};
}

struct Counted {
  inline static std::atomic<int> count = 0;
  Counted() { ++count; }
  Counted(const Counted&) { ++count; }
  ~Counted() { --count; }
};
int alive() { return Counted::count; }

struct CountedKey : Counted {
  explicit CountedKey(int of) : number(of) {}
  bool operator<(const CountedKey& other) const { return number < other.number; }
  int number;
};

void on_threads(int count, const std::function<void()>& work) {
  std::atomic<int> waiting = count;
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&] {
      for (--waiting; waiting > 0;) std::this_thread::yield();
      work();
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(WeakRegistry, GivesTheSameObjectAsLongAsSomebodyHoldsIt) {
  Objects objects;
  EXPECT_EQ(objects.find("a"), nullptr);
  auto first = objects.find_or_make("a", [] { return object(1); });
  EXPECT_EQ(objects.find_or_make("a", [] { return object(2); }), first);
  EXPECT_EQ(objects.find("a"), first);
  EXPECT_EQ(*objects.find_or_make("b", [] { return object(3); }), 3);
  EXPECT_EQ(first.use_count(), 1);
  first = nullptr;
  EXPECT_EQ(objects.find("a"), nullptr);
  EXPECT_EQ(*objects.find_or_make("a", [] { return object(2); }), 2);
}

TEST(WeakRegistry, KnowsNothingOfAnObjectWhoseMakingThrew) {
  Objects objects;
  const auto fails = []() -> std::shared_ptr<int> { throw std::runtime_error("made nothing"); };
  EXPECT_THROW(objects.find_or_make("a", fails), std::runtime_error);
  EXPECT_EQ(objects.find("a"), nullptr);
  const auto made = objects.find_or_make("a", [] { return object(1); });
  EXPECT_EQ(objects.find("a"), made);
}

TEST(WeakRegistry, IsNoLargerThanTwiceWhatLives) {
  WeakRegistry<CountedKey, int> objects;
  std::vector<std::shared_ptr<int>> held;
  for (int i = 0; i < kMany; ++i)
    held.push_back(objects.find_or_make(CountedKey(i), [] { return object(0); }));
  EXPECT_EQ(alive(), kMany);
  for (int i = kMany; i < 10 * kMany; ++i) {
    objects.find_or_make(CountedKey(i), [] { return object(1); });
    ASSERT_LE(alive(), 2 * kMany);
  }
  held.clear();
  for (int i = 10 * kMany; i < 13 * kMany; ++i)
    objects.find_or_make(CountedKey(i), [] { return object(1); });
  EXPECT_EQ(alive(), 1);
}

TEST(WeakRegistry, MakesOneObjectForThreadsThatComeTogether) {
  for (int round = 0; round < 50; ++round) {
    Objects objects;
    std::atomic<int> made = 0;
    std::vector<std::shared_ptr<int>> got(4);
    std::atomic<size_t> next = 0;
    on_threads(4, [&] { got[next++] = objects.find_or_make("a", [&] { return object(++made); }); });
    EXPECT_EQ(made, 1);
    EXPECT_EQ(std::set(got.begin(), got.end()).size(), 1U);
  }
}

TEST(WeakKeyMap, KeepsAValueAsLongAsItsObjectLives) {
  Names names;
  const auto one = object(1), two = object(2);
  EXPECT_EQ(names.find(one), std::nullopt);
  give_name(names, one, "one");
  EXPECT_EQ(names.find(one), "one");
  EXPECT_EQ(names.with(two, [](std::string& name) { return name += "two"; }), "two");
  EXPECT_EQ(names.with(two, [](std::string& name) { return name += "two"; }), "twotwo");
  EXPECT_EQ(names.find(one), "one");
  EXPECT_EQ(one.use_count(), 1);
}

TEST(WeakKeyMap, ForgetsTheValueOfAnObjectWhoseAddressAnotherGets) {
  Names names;
  int place = 0;
  auto owner = object_at(&place);
  give_name(names, owner, "the first one");
  owner = object_at(&place);
  EXPECT_EQ(names.find(owner), std::nullopt);
  EXPECT_EQ(names.with(owner, [](std::string& name) { return name; }), "");
}

TEST(WeakKeyMap, ForgetsItAmongManyThatLiveToo) {
  Names names;
  std::vector<std::shared_ptr<int>> held;
  for (int i = 0; i < kMany; ++i) give_name(names, held.emplace_back(object(0)), "held");
  int place = 0;
  auto owner = object_at(&place);
  give_name(names, owner, "the first one");
  owner = object_at(&place);
  EXPECT_EQ(names.find(owner), std::nullopt);
  EXPECT_EQ(names.with(owner, [](std::string& name) { return name; }), "");
  for (const auto& each : held) ASSERT_EQ(names.find(each), "held");
}

TEST(WeakKeyMap, TakesObjectsThatCountThemselves) {
  struct Target : c10::intrusive_ptr_target {};
  WeakKeyMap<c10::weak_intrusive_ptr<Target>, int> numbers;
  auto owner = c10::make_intrusive<Target>();
  numbers.with(owner, [](int& number) { number = 1; });
  EXPECT_EQ(numbers.find(owner), 1);
  EXPECT_EQ(owner.use_count(), 1);
  owner = c10::make_intrusive<Target>();
  EXPECT_EQ(numbers.find(owner), std::nullopt);
}

TEST(WeakKeyMap, LetsGoOfValuesWhoseObjectsDied) {
  WeakKeyMap<std::weak_ptr<int>, Counted> values;
  const auto holds = [](const Counted&) {};
  std::vector<std::shared_ptr<int>> held;
  for (int i = 0; i < kMany; ++i) values.with(held.emplace_back(object(0)), holds);
  EXPECT_EQ(alive(), kMany);
  for (int i = 0; i < 10 * kMany; ++i) {
    values.with(object(1), holds);
    ASSERT_LE(alive(), 2 * kMany);
  }
  held.clear();
  values.sweep();
  EXPECT_EQ(alive(), 0);
  for (int i = 0; i < 10; ++i) values.with(object(1), holds);
  EXPECT_EQ(alive(), 1);
}

TEST(WeakKeyMap, KeepsAValueWhereItIs) {
  Names names;
  const auto first = object(0);
  const auto address = [](std::string& name) { return &name; };
  auto* const there = names.with(first, address);
  std::vector<std::shared_ptr<int>> held;
  for (int i = 0; i < kMany; ++i) {
    give_name(names, held.emplace_back(object(0)), "held");
    if (i % 2 == 0) held.pop_back();
  }
  EXPECT_EQ(names.with(first, address), there);
}

// What dies with a value may use the same map.
TEST(WeakKeyMap, DestroysValuesWithoutTheLock) {
  using Values = WeakKeyMap<std::weak_ptr<int>, std::shared_ptr<const void>>;
  Values values;
  const auto living = object(0);
  bool found = false;
  const auto looks = [&](const void*) { found = values.find(living).has_value(); };
  const auto gives_last_words = [&](std::shared_ptr<const void>& value) {
    value = {static_cast<const void*>(&values), looks};
  };
  values.with(object(1), gives_last_words);
  values.with(living, [](const auto&) {});
  EXPECT_TRUE(found);
  found = false;
  values.with(object(1), gives_last_words);
  values.sweep();
  EXPECT_TRUE(found);
}

TEST(WeakKeyMap, IsUsedByManyThreadsAtATime) {
  WeakKeyMap<std::weak_ptr<int>, int> numbers;
  const auto shared = object(0);
  on_threads(4, [&] {
    for (int i = 0; i < kMany; ++i) {
      const auto own = object(1);
      ASSERT_EQ(numbers.with(own, [&](int& number) { return number += i; }), i);
      ASSERT_EQ(numbers.find(own), i);
      numbers.with(shared, [](int& count) { ++count; });
      if (i % 100 == 0) numbers.sweep();
    }
  });
  EXPECT_EQ(numbers.find(shared), 4 * kMany);
}

}  // namespace
}  // namespace fsdp::internal
