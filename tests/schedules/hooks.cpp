// The functions that sources compiled with -fsanitize=thread call for each memory access, and the C library functions
// that the linker replaces in this program (--wrap). All of them call the simulation.
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>

#include <linux/futex.h>

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstring>

#include "simulation.h"

using ddpkit::schedules::Arena;
using ddpkit::schedules::Simulation;

namespace {

Simulation* simulated(const volatile void* at) {
  Simulation* const simulation = Simulation::current();
  return simulation && Arena::instance().contains(const_cast<const void*>(at)) ? simulation : nullptr;
}

void read(const void* at, std::size_t bytes) {
  if (Simulation* const simulation = simulated(at)) simulation->memory().read(simulation->rank(), at, bytes);
}

void write(const void* at, std::size_t bytes) {
  if (Simulation* const simulation = simulated(at)) simulation->memory().write(simulation->rank(), at, bytes);
}

template <class T>
T load(const volatile T* at, int order) {
  Simulation* const simulation = simulated(at);
  if (!simulation) return __atomic_load_n(at, __ATOMIC_SEQ_CST);
  simulation->point();
  return static_cast<T>(simulation->memory().load(simulation->rank(), const_cast<T*>(at), sizeof(T),
                                                  static_cast<std::memory_order>(order)));
}

template <class T>
void store(volatile T* at, T value, int order) {
  Simulation* const simulation = simulated(at);
  if (!simulation) return __atomic_store_n(at, value, __ATOMIC_SEQ_CST);
  simulation->point();
  simulation->memory().store(simulation->rank(), const_cast<T*>(at), sizeof(T), value,
                             static_cast<std::memory_order>(order));
}

template <class T, class Change>
T modify(volatile T* at, int order, const Change& change) {
  Simulation* const simulation = simulated(at);
  if (!simulation) {
    T before = __atomic_load_n(at, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(at, &before, change(before), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return before;
  }
  simulation->point();
  return static_cast<T>(simulation->memory().modify(
      simulation->rank(), const_cast<T*>(at), sizeof(T), static_cast<std::memory_order>(order),
      [&](std::uint64_t before) { return std::uint64_t{change(static_cast<T>(before))}; }));
}

template <class T>
bool exchange_if(volatile T* at, T* expected, T value, int order) {
  const T wanted = *expected;
  *expected = modify(at, order, [&](T before) { return before == wanted ? value : before; });
  return *expected == wanted;
}

}  // namespace

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* at, unsigned long bytes) { read(at, bytes); }
void __tsan_write_range(void* at, unsigned long bytes) { write(at, bytes); }
void __tsan_vptr_update(void** at, void*) { write(at, sizeof *at); }
void __tsan_vptr_read(void** at) { read(at, sizeof *at); }

#define DDPKIT_PLAIN(bytes)                                          \
  void __tsan_read##bytes(void* at) { read(at, bytes); }             \
  void __tsan_write##bytes(void* at) { write(at, bytes); }           \
  void __tsan_unaligned_read##bytes(void* at) { read(at, bytes); }   \
  void __tsan_unaligned_write##bytes(void* at) { write(at, bytes); } \
  void __tsan_volatile_read##bytes(void* at) { read(at, bytes); }    \
  void __tsan_volatile_write##bytes(void* at) { write(at, bytes); }
DDPKIT_PLAIN(1)
DDPKIT_PLAIN(2)
DDPKIT_PLAIN(4)
DDPKIT_PLAIN(8)
DDPKIT_PLAIN(16)

#define DDPKIT_ATOMIC(bits)                                                                                           \
  using Word##bits = std::uint##bits##_t;                                                                             \
  Word##bits __tsan_atomic##bits##_load(const volatile Word##bits* at, int order) { return load(at, order); }         \
  void __tsan_atomic##bits##_store(volatile Word##bits* at, Word##bits value, int order) { store(at, value, order); } \
  Word##bits __tsan_atomic##bits##_exchange(volatile Word##bits* at, Word##bits value, int order) {                   \
    return modify(at, order, [&](Word##bits) { return value; });                                                      \
  }                                                                                                                   \
  Word##bits __tsan_atomic##bits##_fetch_add(volatile Word##bits* at, Word##bits value, int order) {                  \
    return modify(at, order, [&](Word##bits before) { return static_cast<Word##bits>(before + value); });             \
  }                                                                                                                   \
  Word##bits __tsan_atomic##bits##_fetch_sub(volatile Word##bits* at, Word##bits value, int order) {                  \
    return modify(at, order, [&](Word##bits before) { return static_cast<Word##bits>(before - value); });             \
  }                                                                                                                   \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile Word##bits* at, Word##bits* expected, Word##bits value,  \
                                                    int order, int) {                                                 \
    return exchange_if(at, expected, value, order);                                                                   \
  }                                                                                                                   \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile Word##bits* at, Word##bits* expected, Word##bits value,    \
                                                  int order, int) {                                                   \
    return exchange_if(at, expected, value, order);                                                                   \
  }
DDPKIT_ATOMIC(8)
DDPKIT_ATOMIC(16)
DDPKIT_ATOMIC(32)
DDPKIT_ATOMIC(64)

void __tsan_atomic_thread_fence(int order) {
  Simulation* const simulation = Simulation::current();
  if (!simulation) return __atomic_thread_fence(__ATOMIC_SEQ_CST);
  simulation->point();
  simulation->memory().fence(simulation->rank(), static_cast<std::memory_order>(order));
}
void __tsan_atomic_signal_fence(int) {}

// The C library.

void* __real_memcpy(void* to, const void* from, std::size_t bytes);
void* __wrap_memcpy(void* to, const void* from, std::size_t bytes) {
  read(from, bytes);
  write(to, bytes);
  return __real_memcpy(to, from, bytes);
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  Simulation* const simulation = Simulation::current();
  if (simulation && number == SYS_membarrier) return simulation->barrier_on_all(arguments[0]);
  if (!simulation || number != SYS_futex)
    return __real_syscall(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
  const auto* word = reinterpret_cast<const std::uint32_t*>(arguments[0]);
  if (!Arena::instance().contains(word)) simulation->fail("a futex in memory that ranks do not share");
  if (arguments[1] == FUTEX_WAKE) {
    simulation->wake(word);
  } else if (arguments[1] == FUTEX_WAIT) {
    const auto* limit = reinterpret_cast<const timespec*>(arguments[3]);
    simulation->wait(word, static_cast<std::uint32_t>(arguments[2]), limit->tv_sec * 1'000'000'000 + limit->tv_nsec);
  } else {
    simulation->fail("a futex operation that the simulation lacks");
  }
  return 0;
}

/// Need not run another rank: the engine yields only a few times before it sleeps.
int __wrap_sched_yield() {
  if (Simulation* const simulation = Simulation::current()) simulation->point();
  return 0;
}

/// Reports one core for all ranks, so that waiting ranks sleep soon.
int __wrap_sched_getaffinity(pid_t, std::size_t bytes, cpu_set_t* cores) {
  std::memset(cores, 0, bytes);
  CPU_SET(0, cores);
  return 0;
}

int __real_nanosleep(const timespec* time, timespec* left);
int __wrap_nanosleep(const timespec* time, timespec* left) {
  Simulation* const simulation = Simulation::current();
  if (!simulation) return __real_nanosleep(time, left);
  simulation->sleep(time->tv_sec * 1'000'000'000 + time->tv_nsec);
  return 0;
}

/// std::chrono::steady_clock::now(), which returns nanoseconds.
std::int64_t __real__ZNSt6chrono3_V212steady_clock3nowEv();
std::int64_t __wrap__ZNSt6chrono3_V212steady_clock3nowEv() {
  Simulation* const simulation = Simulation::current();
  return simulation ? simulation->now() : __real__ZNSt6chrono3_V212steady_clock3nowEv();
}

/// A rank's process id belongs to no process of this machine.
int __wrap_kill(pid_t, int) { return 0; }

}  // extern "C"
