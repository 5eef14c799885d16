// What follows from what ranks tell of themselves: advice, and which address a rank
// connects by, decided alone.
#include "device_mesh/rendezvous/presence.h"

#include "tests/support/errors.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Two processes on each of two hosts of four cores.
const std::vector<Presence> kTwoHosts = {{.host = "a", .pid = 1},
                                         {.host = "b", .pid = 1},
                                         {.host = "a", .pid = 2},
                                         {.host = "b", .pid = 2}};

TEST(AdviceAboutThreads, IsOfTheFirstRankOfEachHost) {
  EXPECT_THAT(advice_about_threads(kTwoHosts, 0, 4, 4),
              AllOf(HasSubstr("2 ranks on host 'a' compute with 4 threads each on 4 cores"),
                    HasSubstr("OMP_NUM_THREADS=2,")));
  EXPECT_THAT(advice_about_threads(kTwoHosts, 1, 4, 4), HasSubstr("host 'b'"));
  EXPECT_THAT(advice_about_threads(kTwoHosts, 2, 4, 4), IsEmpty());
  EXPECT_THAT(advice_about_threads(kTwoHosts, 3, 4, 4), IsEmpty());
}

TEST(AdviceAboutThreads, IsNoneWhereCoresAreEnough) {
  EXPECT_THAT(advice_about_threads(kTwoHosts, 0, 2, 4), IsEmpty());
  EXPECT_THAT(advice_about_threads(kTwoHosts, 0, 3, 4), HasSubstr("OMP_NUM_THREADS=2,"));
  EXPECT_THAT(advice_about_threads(kTwoHosts, 0, 2, 1), HasSubstr("OMP_NUM_THREADS=1,"));
}

TEST(AdviceAboutThreads, IsNoneWhereRanksHaveOneThread) {
  EXPECT_THAT(advice_about_threads(kTwoHosts, 0, 1, 1), IsEmpty());
}

TEST(AdviceAboutThreads, IsNoneToOneRankNorToRanksThatAreThreads) {
  EXPECT_THAT(advice_about_threads({{.host = "a", .pid = 1}}, 0, 8, 4), IsEmpty());
  EXPECT_THAT(advice_about_threads({{.host = "a", .pid = 1}, {.host = "a", .pid = 1}}, 0, 4, 4),
              IsEmpty());
}

using ::testing::ElementsAre;
using testing::expect_error;

const std::vector<NetworkInterface> kInterfaces = {
    {"lo", {"127.0.0.1", "::1"}}, {"eth0", {"10.0.0.1"}}, {"ib0", {"10.1.0.1"}}, {"bare", {}}};

Presence at(const std::string& host, const std::string& address) {
  return {.host = host, .pid = 1, .network = "network of " + host, .address = address};
}

std::string no_way(const std::string&) { return ""; }

std::string address_of(const Presence& own, const std::vector<Presence>& all) {
  return gloo_address(own, all, &no_way, kInterfaces);
}

TEST(GlooAddress, InterfacesAreListedAsPyTorchReadsThem) {
  EXPECT_THAT(parse_interface_list(std::nullopt), IsEmpty());
  EXPECT_THAT(parse_interface_list(""), IsEmpty());
  EXPECT_THAT(parse_interface_list("eth0"), ElementsAre("eth0"));
  EXPECT_THAT(parse_interface_list("eth0,ib0"), ElementsAre("eth0", "ib0"));
}

TEST(GlooAddress, AnInterfaceThatIsNotThereIsToldWithThoseThatAre) {
  EXPECT_THAT(addresses_of({"eth0", "ib0"}, kInterfaces), ElementsAre("10.0.0.1", "10.1.0.1"));
  expect_error<c10::ValueError>(
      [] {
        addresses_of({"eth0", "eth9"}, kInterfaces);
      },
      AllOf(HasSubstr("GLOO_SOCKET_IFNAME names the network interface 'eth9'"),
            HasSubstr("it has: lo 127.0.0.1 ::1, eth0 10.0.0.1, ib0 10.1.0.1, bare")));
  expect_error<c10::ValueError>([] { addresses_of({"bare"}, kInterfaces); },
                                HasSubstr("'bare', which has no address"));
}

TEST(GlooAddress, RanksOfOneHostMayUseItsLoopbackAddress) {
  const auto loopback = at("a", "127.0.0.1");
  EXPECT_EQ(address_of(loopback, {loopback, loopback}), "127.0.0.1");
  EXPECT_EQ(address_of(at("a", ""), {at("a", ""), at("a", "")}), "127.0.0.1");
}

TEST(GlooAddress, AHostsOwnAddressIsUsedWhereOthersReachIt) {
  EXPECT_EQ(address_of(at("a", "10.0.0.1"), {at("a", "10.0.0.1"), at("b", "127.0.0.1")}),
            "10.0.0.1");
}

TEST(GlooAddress, ALoopbackAddressGivesWayToTheOneTowardsAnotherHost) {
  const std::vector<Presence> all = {at("a", "127.0.1.1"), at("b", "127.0.1.1"),
                                     at("c", "10.0.0.3")};
  const auto towards = [](const std::string& host) {
    return host == "10.0.0.3" ? std::string("10.0.0.1") : "127.0.0.1";
  };
  EXPECT_EQ(gloo_address(all[0], all, towards, kInterfaces), "10.0.0.1");
}

TEST(GlooAddress, LoopbackAddressesOnlyAreAnErrorBeforeAnybodyConnects) {
  const std::vector<Presence> all = {at("a", "127.0.1.1"), at("b", "127.0.1.1")};
  expect_error<c10::ValueError>(
      [&] { address_of(all[0], all); },
      AllOf(HasSubstr("ranks on host 'b' reach those on host 'a'"),
            HasSubstr("Set GLOO_SOCKET_IFNAME"), HasSubstr("eth0 10.0.0.1")));
}

TEST(GlooAddress, ALoopbackInterfaceOfTheUsersIsAnErrorBetweenHosts) {
  const auto own = at("a", "127.0.0.1");
  EXPECT_NO_THROW(check_reachable({"lo"}, own, {own, own}, kInterfaces));
  EXPECT_NO_THROW(check_reachable({"eth0", "ib0"}, own, {own, at("b", "")}, kInterfaces));
  expect_error<c10::ValueError>(
      [&] {
        check_reachable({"eth0", "lo"}, own, {own, at("b", "")}, kInterfaces);
      },
      AllOf(HasSubstr("GLOO_SOCKET_IFNAME names 'lo', whose address 127.0.0.1"),
            HasSubstr("the ranks on host 'b' can not reach")));
}

TEST(GlooAddress, LoopbackAddressesAreRecognised) {
  for (const auto* address : {"localhost", "127.0.0.1", "127.0.1.1", "::1"})
    EXPECT_TRUE(is_loopback(address)) << address;
  for (const auto* address : {"", "10.0.0.1", "node0", "fd00::1", "128.0.0.1"})
    EXPECT_FALSE(is_loopback(address)) << address;
}

}  // namespace
}  // namespace fsdp::internal
