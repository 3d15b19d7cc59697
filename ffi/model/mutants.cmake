# Weakenings of the protocols, each of which the model must find.
#
#   jax_ring_mutant(model name file from to scenario expected)

# --- Memory orders and fences.
jax_ring_mutant(ring_model post_relaxed ring/memory.h
  [==[store(value, cuda::memory_order_release)]==] [==[store(value, cuda::memory_order_relaxed)]==]
  "two-shot, 2 ranks x 1" "data race")
jax_ring_mutant(ring_model load_relaxed ring/memory.h
  [==[load(cuda::memory_order_acquire)]==] [==[load(cuda::memory_order_relaxed)]==]
  "order of ranks, 2 ranks x 1" "data race")
jax_ring_mutant(ring_model two_shot_post_without_sync ring/two_shot.h
  [==[    team.sync();
    for (int step]==] [==[    for (int step]==]
  "two-shot, 2 ranks x 2" "data race")
jax_ring_mutant(ring_model two_shot_wait_without_all ring/two_shot.h
  [==[return team.all(ok);]==] [==[return ok;]==]
  "two-shot, 3 ranks x 2" "data race")
jax_ring_mutant(ring_model ring_finish_without_sync ring/ring.h
  [==[    team.sync();
    sent += sends;]==] [==[    sent += sends;]==]
  "order of ranks, 2 ranks x 2" "data race")

# --- One-shot: lines and their tags.
jax_ring_mutant(ring_model one_shot_without_all ring/one_shot.h
  [==[    ok = team.all(ok);]==] [==[]==]
  "one-shot, 2 ranks x 2" "(wrong result|deadlock|two threads)")
jax_ring_mutant(ring_model one_shot_one_set ring/one_shot.h
  [==[static_cast<int>(epoch % 2)]==] [==[0]==]
  "one-shot, 2 ranks x 1" "(wrong result|deadlock)")
jax_ring_mutant(ring_model one_shot_without_sweep ring/one_shot.h
  [==[if (swept > kLinesPerPack * range.size())]==] [==[if (false)]==]
  "one-shot after" "wrong result")
jax_ring_mutant(ring_model one_shot_half_a_tag ring/one_shot.h
  [==[return line.word[0] >> 32 == tag && line.word[1] >> 32 == tag;]==] [==[return line.word[0] >> 32 == tag;]==]
  "one-shot, 2 ranks x 1" "(wrong result|a rank has failed)")
jax_ring_mutant(ring_model one_shot_without_header ring/one_shot.h
  [==[data_of(header) != message.fingerprint]==] [==[false]==]
  "different calls" "a mismatch was not reported")

# --- Two-shot: rounds and their flags.
jax_ring_mutant(ring_model two_shot_without_fingerprint ring/signal.h
  [==[if (seen == expected) return true;]==] [==[return true;]==]
  "different calls" "a mismatch was not reported")
jax_ring_mutant(ring_model two_shot_buffer_a_round_early ring/two_shot.h
  [==[return round.await_all(FlagKind::gathered, Step::all_gather);]==] [==[return true;]==]
  "two-shot, 2 ranks x 1" "data race")
jax_ring_mutant(ring_model two_shot_round_forgotten ring/two_shot.h
  [==[if (ok && team.thread() == 0) progress.round = number;]==] [==[]==]
  "two-shot, 2 ranks x 1" "a rank has failed")

# --- The ring: slots, heads and tails.
jax_ring_mutant(ring_model ring_slot_too_many ring/ring.h
  [==[const uint32_t needed = sent + 1 - ]==] [==[const uint32_t needed = sent - ]==]
  "order of the ring, 2 ranks x 1" "data race")
jax_ring_mutant(ring_model ring_head_before_read ring/ring.h
  [==[  const Pack* in = link.incoming();]==]
  [==[  if (hop.receives() && link.team.thread() == 0) {
    post_flag(link.self.flag(link.previous(), FlagKind::head, link.cta, 0), link.received + 1);
  }
  const Pack* in = link.incoming();]==]
  "order of the ring, 2 ranks x 1" "data race")
jax_ring_mutant(ring_model ring_tail_before_data ring/ring.h
  [==[  const Pack* in = link.incoming();]==]
  [==[  if (hop.sends() && link.team.thread() == 0) {
    post_flag(link.self.flag(link.next(), FlagKind::tail, link.cta, 0), link.sent + 1);
  }
  const Pack* in = link.incoming();]==]
  "order of ranks, 2 ranks x 1" "data race")
jax_ring_mutant(ring_model ring_without_fingerprint ring/ring.h
  [==[if (ok && read_word(slot(self.rank, received)->word) != fingerprint)]==] [==[if (false)]==]
  "different calls" "a mismatch was not reported")
jax_ring_mutant(ring_model ring_compares_without_wrap ring/signal.h
  [==[return static_cast<int32_t>(a - b) < 0;]==] [==[return a < b;]==]
  "order of ranks, 2 ranks x 1" "(data race|deadlock)")
