#include "launch/host_rounds.h"

#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/launch/launcher.h>

#include "comm/host.h"
#include "comm/master_address.h"
#include "comm/roll_call.h"
#include "comm/sockets.h"
#include "comm/store/keyed_store.h"
#include "comm/store/store_key.h"
#include "launch/hosted_store.h"

namespace ddpkit::launcher {
namespace {

using std::chrono::milliseconds;
using store::KeyedStore;

// The keys. ID: number of launchers that arrived earlier. ROUND: number of earlier rounds.
//   terms            options that must be equal on all hosts
//   launchers        launchers besides host 0
//   name/ID          name of the host
//   heartbeat/ID     increases
//   rounds           plans so far
//   plan/ROUND       hosts of a round, or the end of the run
//   end/ROUND        the first failure
//   result/ROUND/ID  how the round ended on a host
//   left/ID          the launcher has read the end of the run
std::string id_key(const char* what, int id) { return fmt::format("{}/{}", what, id); }
std::string result_key(int round, int id) { return fmt::format("result/{}/{}", round, id); }

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

/// Returns whether the socket listens on all addresses, and not only on a loopback address.
bool listens_everywhere(int listener) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0) return false;
  if (address.ss_family == AF_INET) return reinterpret_cast<sockaddr_in&>(address).sin_addr.s_addr == INADDR_ANY;
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<sockaddr_in6&>(address).sin6_addr);
}

double seconds_of(milliseconds time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

struct HostRounds::Stores {
  c10::intrusive_ptr<KeyedStore> main;
  c10::intrusive_ptr<KeyedStore> failures;  ///< For fail(): a call of another thread may wait in `main`.
};

HostRounds::HostRounds(const LaunchOptions& launch, const HostOptions& hosts)
    : hosts_(hosts),
      name_(first_line("/proc/sys/kernel/hostname")),
      terms_(fmt::format("{} ranks per host, --nnodes {}:{}, --max-restarts {}", launch.ranks, hosts.min_hosts,
                         hosts.max_hosts, hosts.max_restarts)),
      interval_(std::min<milliseconds>(hosts.heartbeat_timeout / 8, milliseconds(250))),
      stores_(std::make_unique<Stores>()),
      bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (bell_ < 0) throw Error(fmt::format("no descriptor for the rendezvous: {}", std::strerror(errno)));
  const std::string file = key_file_of(launch);
  if (file.empty())
    throw InvalidArgument(
        "a rendezvous of several hosts needs a key, or everybody who reaches the port could join: create a key file, "
        "copy it to all hosts, and add --key-file FILE (or set DDPKIT_KEY_FILE)");
  LaunchEnvironment place;
  place.rank = -1;
  place.master_addr = usable_loopback(hosts.address);
  place.master_port = static_cast<std::uint16_t>(hosts.port);
  store::StorePlace at{.address = {},
                       .name = fmt::format("{}:{}", hosts.address, hosts.port),
                       .key = store::read_key_file(file),
                       .run = hosts.run_id};
  if (const auto listener = listen_if_first(place)) {
    // Host 0 does not need its network to reach its store.
    if (listens_everywhere(*listener)) place.master_addr = usable_loopback("127.0.0.1");
    server_.emplace(*listener, at.key, at.run);
  }
  at.address = wait_for_master(place, "the launcher of host 0", hosts.join_timeout);
  try {
    for (auto* connection : {&stores_->main, &stores_->failures}) {
      *connection = c10::make_intrusive<KeyedStore>(at, hosts.join_timeout, hosts.heartbeat_timeout);
      (*connection)->setTimeout(interval_);  // The limit of a call without a wait.
    }
    introduce();
  } catch (const c10::Error& error) {
    throw RendezvousError(error.what_without_backtrace(), {.call = "rendezvous"});
  }
}

HostRounds::~HostRounds() {
  stop_ = true;
  if (watch_.joinable()) watch_.join();
  ::close(bell_);
}

void HostRounds::introduce() {
  KeyedStore& store = *stores_->main;
  if (server_) {
    store.multiSet({id_key("name", 0), "terms"}, {bytes_of(name_), bytes_of(terms_)});
    return;
  }
  if (!store.exists_within("terms", hosts_.heartbeat_timeout))
    throw RendezvousError(fmt::format("the launcher of host 0 at {}:{} does not answer", hosts_.address, hosts_.port),
                          {.call = "rendezvous"});
  if (const std::string theirs = store.get_to_str("terms"); theirs != terms_)
    throw InvalidArgument(
        fmt::format("this launcher has {}, but host 0 has {}: use the same options on all hosts", terms_, theirs));
  // Read before the first heartbeat: host 0 includes this host in no earlier plan.
  round_ = static_cast<int>(store.add("rounds", 0)) - 1;
  id_ = static_cast<int>(store.add("launchers", 1));
  store.multiSet({id_key("heartbeat", id_), id_key("name", id_)}, {bytes_of("1"), bytes_of(name_)});
}

bool HostRounds::wait_for(const std::string& key) {
  if (server_)
    read_heartbeats();
  else
    stores_->main->add(id_key("heartbeat", id_), 1);
  return stores_->main->exists_within(key, interval_);
}

void HostRounds::read_heartbeats() {
  KeyedStore& store = *stores_->main;
  const auto now = Clock::now();
  // If this launcher did not run for some time, the store has not received the heartbeats of that time.
  const auto elapsed = std::min<Clock::duration>(now - read_at_, 2 * interval_);
  read_at_ = now;
  others_.resize(static_cast<std::size_t>(store.add("launchers", 0)));
  for (std::size_t i = 0; i < others_.size(); ++i) {
    const std::int64_t heartbeats = store.add(id_key("heartbeat", static_cast<int>(i) + 1), 0);
    Other& other = others_[i];
    other.silence = heartbeats != other.heartbeats ? Clock::duration() : other.silence + elapsed;
    other.heartbeats = heartbeats;
  }
  for (std::size_t host = 0; host < members_.size(); ++host) {
    const int id = members_[host];
    if (is_alive(id) || store.check({result_key(round_, id)}) || store.check({id_key("end", round_)})) continue;
    const std::string text = fmt::format("{} has sent no heartbeat for {:.1f} s\n", host_text(host, name_of(id)),
                                         seconds_of(hosts_.heartbeat_timeout));
    post_end(store, {.id = id, .text = text});
  }
}

bool HostRounds::is_alive(int id) const {
  if (id == 0) return true;
  const Other& other = others_[static_cast<std::size_t>(id) - 1];
  return other.heartbeats > 0 && other.silence < hosts_.heartbeat_timeout;
}

std::vector<int> HostRounds::alive() const {
  std::vector<int> ids;
  for (int id = 0; id <= static_cast<int>(others_.size()); ++id) {
    if (is_alive(id)) ids.push_back(id);
  }
  return ids;
}

std::string HostRounds::name_of(int id) const { return stores_->main->get_to_str(id_key("name", id)); }

RoundPlan HostRounds::first_plan() {
  const auto start = Clock::now();
  std::optional<Clock::time_point> enough_since;
  WaitReport wait_report;
  for (;;) {
    read_heartbeats();
    RoundPlan plan{.members = alive()};
    const std::size_t present = plan.members.size();
    const auto now = Clock::now();
    if (present < static_cast<std::size_t>(hosts_.min_hosts))
      enough_since.reset();
    else if (!enough_since)
      enough_since = now;
    const auto waited = std::chrono::duration_cast<milliseconds>(now - enough_since.value_or(now));
    if (const std::size_t count = hosts_of_first_round(present, waited, hosts_); count > 0) {
      plan.members.resize(count);
      return plan;
    }
    const std::string text =
        fmt::format("{} of {} hosts have come to {}:{}", present, enough_since ? hosts_.max_hosts : hosts_.min_hosts,
                    hosts_.address, hosts_.port);
    if (!enough_since && now - start > hosts_.join_timeout)
      return {.exit_code = 1,
              .report = {fmt::format("the rendezvous timed out: only {} within {:.1f} s\n", text,
                                     seconds_of(hosts_.join_timeout))}};
    wait_report.write_if_late([&] { return text; });
    wait_for(id_key("name", static_cast<int>(others_.size()) + 1));
  }
}

RoundPlan HostRounds::later_plan() {
  std::vector<RoundHost> hosts;
  for (const int id : members_) {
    RoundHost& host = hosts.emplace_back(RoundHost{.name = name_of(id)});
    const std::string key = result_key(round_, id);
    bool exists = false;
    while (!(exists = wait_for(key)) && is_alive(id)) {
    }
    if (exists) host.result = read_result(stores_->main->get_to_str(key));
  }
  std::optional<std::size_t> first;
  if (const std::string key = id_key("end", round_); stores_->main->check({key})) {
    const auto found = std::ranges::find(members_, read_end(stores_->main->get_to_str(key)).id);
    if (found != members_.end()) first = static_cast<std::size_t>(found - members_.begin());
  }
  RoundPlan plan{.members = alive()};
  const Decision decision = decide(hosts, first, plan.members.size(), restarts_, hosts_);
  plan.report = decision.report;
  if (!decision.continues) plan.exit_code = decision.exit_code;
  if (plan.members.size() > static_cast<std::size_t>(hosts_.max_hosts))
    plan.members.resize(static_cast<std::size_t>(hosts_.max_hosts));
  restarts_ += decision.is_restart ? 1 : 0;
  return plan;
}

HostRounds::Round HostRounds::next() {
  if (store_is_lost_) return {.exit_code = kHostLost};
  try {
    for (;;) {
      const bool took_part = !members_.empty();
      if (round_ >= 0 && !took_part && !std::exchange(is_spare_, true))
        report("the ranks of the other hosts run already; this host waits for the next round\n");
      if (server_) publish(took_part ? later_plan() : first_plan());
      const std::string key = id_key("plan", round_ + 1);
      while (!wait_for(key)) {
      }
      ++round_;
      const RoundPlan plan = read_plan(stores_->main->get_to_str(key));
      const auto found = std::ranges::find(plan.members, id_);
      const bool takes_part = found != plan.members.end();
      if (took_part || takes_part || plan.exit_code) {
        for (const std::string& line : plan.report) report(line);
      }
      members_ = plan.members;
      if (plan.exit_code) {
        leave();
        return {.exit_code = plan.exit_code};
      }
      if (takes_part)
        return {.number = round_,
                .hosts = static_cast<int>(members_.size()),
                .host = static_cast<int>(found - plan.members.begin()),
                .port = plan.port};
      members_.clear();
      if (!took_part) continue;
      report(
          "host 0 has received no heartbeat of this host in time, so the run continues without it; start "
          "the same command again to take part in the next round\n");
      return {.exit_code = kHostLost};
    }
  } catch (const c10::Error&) {
    lose_store();
    return {.exit_code = kHostLost};
  }
}

void HostRounds::publish(const RoundPlan& plan) {
  RoundPlan complete = plan;
  if (!plan.exit_code) complete.port = port_.emplace().number();
  members_.clear();  // Their results are complete.
  stores_->main->multiSet({id_key("plan", round_ + 1), "rounds"},
                          {bytes_of(text_of(complete)), bytes_of(std::to_string(round_ + 2))});
}

void HostRounds::leave() {
  members_.clear();
  if (!server_) {
    stores_->main->set(id_key("left", id_), bytes_of("1"));
    return;
  }
  // Serves the store until the others have read the end of the run.
  for (const int id : alive()) {
    while (id != 0 && !wait_for(id_key("left", id)) && is_alive(id)) {
    }
  }
}

void HostRounds::watch() {
  std::uint64_t count = 0;
  while (::read(bell_, &count, sizeof count) > 0) {
  }
  stop_ = has_ended_ = false;
  blamed_rank_ = kNoRank;
  watch_ = std::thread([this] { run_watch(); });
}

void HostRounds::run_watch() {
  const auto end_round = [&] {
    has_ended_ = true;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(bell_, &one, sizeof one);
  };
  try {
    const std::string key = id_key("end", round_);
    while (!wait_for(key)) {
      if (stop_) return;
    }
    const RoundEnd end = read_end(stores_->main->get_to_str(key));
    blamed_rank_ = end.blamed_rank;
    if (!end.text.empty()) report(end.text);
    end_round();
    // Heartbeats while the launch ends its ranks. The next plan comes early only without this host.
    while (!stop_ && !wait_for(id_key("plan", round_ + 1))) {
    }
  } catch (const c10::Error&) {
    lose_store();
    end_round();
  }
}

void HostRounds::finish(const HostResult& result) {
  stop_ = true;
  watch_.join();
  if (store_is_lost_) return;
  try {
    if (!result.is_ok) post_end(*stores_->main, {.id = id_});
    stores_->main->set(result_key(round_, id_), bytes_of(text_of(result)));
  } catch (const c10::Error&) {
    lose_store();
  }
}

void HostRounds::fail(int blamed_rank) noexcept {
  try {
    post_end(*stores_->failures, {.id = id_, .blamed_rank = blamed_rank});
  } catch (const std::exception&) {
    // The watch reports a lost store. If only this connection is lost, finish() ends the round.
  }
}

/// The first failure of a round is kept.
void HostRounds::post_end(c10d::Store& store, const RoundEnd& end) const {
  store.compareSet(id_key("end", round_), {}, bytes_of(text_of(end)));
}

void HostRounds::report(const std::string& text) const {
  if (hosts_.on_report) hosts_.on_report(text);
}

void HostRounds::lose_store() {
  store_is_lost_ = true;
  report(
      fmt::format("host 0 ({}:{}), which serves the store, is lost; start the same command again on all "
                  "hosts: the run resumes from its last checkpoint\n",
                  hosts_.address, hosts_.port));
}

}  // namespace ddpkit::launcher
