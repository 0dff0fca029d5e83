//! How long many hosts take that start the same model at once, by each way that the weights can come to them.
//!
//! Deterministic and without a clock: a model of S bytes is cut into equal chunks, and a stage is a server that passes them on
//! in order. All stages here are of constant rate, so a stream of chunks stays an arithmetic progression (`Wave`) through any
//! number of them, and the event by event simulation (the tests have it, as the oracle) has an exact short form. A fleet of
//! 10,000 hosts costs microseconds. Nothing here measures; `docs/scaling.md` has the formulas and what is left out.

use serde::Serialize;

use super::links::as_f64;

#[cfg(test)]
mod tests;

/// A store that all hosts read at once. Rates are bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Storage {
    /// What one host gets at most.
    pub per_host: f64,
    /// What it gives to all of them together; infinite if it grows with them.
    pub total: f64,
}

/// The drives of one host, together. Rates are bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Drives {
    /// Reading.
    pub read: f64,
    /// Writing.
    pub write: f64,
}

/// Hosts that are alike, and the model that each of them wants. Rates are bytes per second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fleet {
    /// N: how many.
    pub hosts: u64,
    /// S: bytes of the model. A host takes them in once, whatever its GPUs make of them.
    pub bytes: u64,
    /// The smallest piece that is passed on, in bytes.
    pub chunk_bytes: u64,
    /// GPUs of a host, each with a link of its own.
    pub gpus: u64,
    /// Rate of each of these links.
    pub gpu_link: f64,
    /// Whether each GPU takes the whole model (`true`) or its share of it by tensor parallelism (`false`).
    pub gpu_copies: bool,
    /// Rate of a host's network card, in each direction.
    pub nic: f64,
    /// A file system that all hosts mount, if there is one.
    pub shared: Option<Storage>,
    /// An object store, if there is one.
    pub object: Option<Storage>,
    /// Drives in each host, if there are any.
    pub nvme: Option<Drives>,
}

/// How the weights come to the hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Each host reads them from the shared file system.
    SharedStorage,
    /// Each host reads them from the object store.
    ObjectStorage,
    /// A few hosts read them from the faster store, and every host passes on what it has.
    Peers,
    /// Each host copies them from the faster store to its drives first, and loads when the copy is complete.
    FilledNvme,
    /// They lie on the drives of each host already.
    LocalNvme,
}

impl Way {
    /// Whether it can be taken by hosts that have nothing yet.
    pub fn starts_empty(self) -> bool {
        self != Way::LocalNvme
    }
}

/// What decides a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// What the store gives to all hosts together.
    StorageTotal,
    /// What the store gives to one host.
    StoragePerHost,
    /// The network cards.
    Nic,
    /// Reading from the drives.
    NvmeRead,
    /// Writing to the drives.
    NvmeWrite,
    /// The links to the GPUs.
    GpuLink,
}

/// How peers pass the chunks on: `groups` sets of hosts that know nothing of each other. In each, the chunks are dealt to
/// `stripes` trees in which a node has as many children; a host is an inner node of one tree only, so that all of its uplink
/// is used. One stripe is a plain chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Spread {
    /// Whole copies that are read from the store.
    pub groups: u64,
    /// Trees of a group, and children of a node.
    pub stripes: u64,
    /// Times that the last chunk is passed from host to host.
    pub hops: u64,
}

/// One way, with its time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Which.
    pub way: Way,
    /// T: seconds until the last GPU of the last host has its last byte.
    pub seconds: f64,
    /// What decides it.
    pub limit: Limit,
    /// The store that the bytes come from, for ways that have a choice.
    pub from: Option<Way>,
    /// Bytes that the store gives out to all hosts.
    pub storage_bytes: u64,
    /// How peers do it.
    pub spread: Option<Spread>,
}

/// From this number of hosts on, this way is best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Flip {
    /// N*.
    pub hosts: u64,
    /// The best way from there on.
    pub way: Way,
}

/// A way has to save more than this share of the time to be preferred to a simpler one.
const WORTHWHILE: f64 = 0.001;

/// Every way that the fleet can take, the simplest first. A way whose numbers are no bandwidths (zero, negative) is left out.
pub fn simulate(fleet: &Fleet) -> Vec<Outcome> {
    let direct = [(Way::SharedStorage, fleet.shared), (Way::ObjectStorage, fleet.object)];
    let direct = direct.into_iter().filter_map(|(way, store)| Some(fleet.directly(way, store?)));
    let mut outcomes: Vec<_> = direct.filter(is_finite).collect();
    let source = quickest(&outcomes).map(|best| best.way);
    let peers = [Way::SharedStorage, Way::ObjectStorage].into_iter().filter_map(|way| fleet.by_peers(way));
    let peers: Vec<_> = peers.filter(is_finite).collect();
    outcomes.extend(quickest(&peers).cloned());
    let nvme = [source.and_then(|source| fleet.filling_nvme(source)), fleet.nvme.map(|nvme| fleet.reading_nvme(nvme))];
    outcomes.extend(nvme.into_iter().flatten().filter(is_finite));
    outcomes
}

/// The best of the ways for hosts that have nothing yet: the quickest, or a simpler one that is as quick.
pub fn best(outcomes: &[Outcome]) -> Option<&Outcome> {
    let empty: Vec<_> = outcomes.iter().filter(|outcome| outcome.way.starts_empty()).collect();
    let least = empty.iter().map(|outcome| outcome.seconds).min_by(f64::total_cmp)?;
    empty.into_iter().find(|outcome| outcome.seconds <= least * (1.0 + WORTHWHILE))
}

/// Which way is best from one host up to `up_to` hosts, and where that changes. The first entry is for one host.
///
/// Looked for in steps of a tenth, and then exactly: a way that is best only between two steps is not found.
pub fn flips(fleet: &Fleet, up_to: u64) -> Vec<Flip> {
    let winner = |hosts| best(&simulate(&Fleet { hosts, ..fleet.clone() })).map(|outcome| outcome.way);
    let Some(mut way) = winner(1) else { return Vec::new() };
    let mut found = vec![Flip { hosts: 1, way }];
    let mut low = 1;
    while low < up_to {
        let high = (low + low / 10 + 1).min(up_to);
        let Some(then) = winner(high) else { break };
        if then != way {
            let hosts = first_between(low, high, |hosts| winner(hosts) != Some(way));
            way = winner(hosts).unwrap_or(then);
            found.push(Flip { hosts, way });
            low = hosts;
        } else {
            low = high;
        }
    }
    found
}

/// The least number in `low + 1 ..= high` of which `holds` is true, if it stays true; `holds(high)` is.
fn first_between(mut low: u64, mut high: u64, holds: impl Fn(u64) -> bool) -> u64 {
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if holds(middle) { high = middle } else { low = middle }
    }
    high
}

fn is_finite(outcome: &Outcome) -> bool {
    outcome.seconds.is_finite() && outcome.seconds >= 0.0
}

fn quickest(outcomes: &[Outcome]) -> Option<&Outcome> {
    outcomes.iter().reduce(|a, b| if b.seconds < a.seconds { b } else { a })
}

/// Chunks that come one after the other: the first at `first` seconds, each next `step` seconds later.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Wave {
    first: f64,
    step: f64,
    chunks: f64,
}

impl Wave {
    /// Out of a stage that needs `service` seconds a chunk.
    fn of(service: f64, chunks: f64) -> Wave {
        Wave { first: service, step: service, chunks }
    }

    /// After a further stage, which takes chunks in order, one at a time. Exact, because the steps are equal.
    fn through(self, service: f64) -> Wave {
        Wave { first: self.first + service, step: self.step.max(service), ..self }
    }

    /// When the last chunk is there.
    fn last(self) -> f64 {
        self.first + (self.chunks - 1.0) * self.step
    }
}

impl Fleet {
    fn chunks(&self) -> f64 {
        as_f64(self.bytes.div_ceil(self.chunk_bytes.max(1)).max(1))
    }

    /// Bytes of a chunk; all are alike.
    fn chunk(&self) -> f64 {
        as_f64(self.bytes) / self.chunks()
    }

    /// Chunks at this rate.
    fn wave(&self, rate: f64) -> Wave {
        Wave::of(self.chunk() / rate, self.chunks())
    }

    /// The rate at which a host's chunks go to where its GPUs want them.
    fn gpu_rate(&self) -> f64 {
        if self.gpu_copies { self.gpu_link } else { self.gpu_link * as_f64(self.gpus.max(1)) }
    }

    /// When a wave has gone on to the GPUs.
    fn on_gpus(&self, wave: Wave) -> f64 {
        wave.through(self.chunk() / self.gpu_rate()).last()
    }

    fn store(&self, way: Way) -> Option<Storage> {
        match way {
            Way::SharedStorage => self.shared,
            Way::ObjectStorage => self.object,
            _ => None,
        }
    }

    /// What a host (or a group of peers that reads by several hosts) gets of a store that `readers` such share.
    fn feed(&self, store: Storage, hosts_reading: u64, readers: u64) -> (f64, Limit) {
        slowest(&[
            (store.total / as_f64(readers.max(1)), Limit::StorageTotal),
            (store.per_host * as_f64(hosts_reading), Limit::StoragePerHost),
            (self.nic, Limit::Nic),
        ])
    }

    fn outcome(&self, way: Way, seconds: f64, limit: Limit, copies: u64) -> Outcome {
        let storage_bytes = self.bytes.saturating_mul(copies);
        Outcome { way, seconds, limit, from: None, storage_bytes, spread: None }
    }

    fn directly(&self, way: Way, store: Storage) -> Outcome {
        let hosts = self.hosts.max(1);
        let (rate, limit) = self.feed(store, 1, hosts);
        let (_, limit) = slowest(&[(rate, limit), (self.gpu_rate(), Limit::GpuLink)]);
        self.outcome(way, self.on_gpus(self.wave(rate)), limit, hosts)
    }

    fn reading_nvme(&self, nvme: Drives) -> Outcome {
        let (_, limit) = slowest(&[(nvme.read, Limit::NvmeRead), (self.gpu_rate(), Limit::GpuLink)]);
        self.outcome(Way::LocalNvme, self.on_gpus(self.wave(nvme.read)), limit, 0)
    }

    fn filling_nvme(&self, source: Way) -> Option<Outcome> {
        let (nvme, store) = (self.nvme?, self.store(source)?);
        let (rate, limit) = self.feed(store, 1, self.hosts);
        let fill = self.wave(rate).through(self.chunk() / nvme.write).last();
        let (_, fill_limit) = slowest(&[(rate, limit), (nvme.write, Limit::NvmeWrite)]);
        let load = self.reading_nvme(nvme);
        let limit = if fill >= load.seconds { fill_limit } else { load.limit };
        let outcome = self.outcome(Way::FilledNvme, fill + load.seconds, limit, self.hosts.max(1));
        Some(Outcome { from: Some(source), ..outcome })
    }

    /// The best way to spread them, over numbers of groups and of stripes that are powers of two; of those that are as quick
    /// the one that reads fewest copies.
    fn by_peers(&self, source: Way) -> Option<Outcome> {
        let store = self.store(source)?;
        let groups = powers_of_two().take_while(|&groups| groups < self.hosts);
        let outcomes = groups.flat_map(|groups| {
            let members = self.hosts.div_ceil(groups);
            let stripes = powers_of_two().take_while(move |&stripes| stripes <= members);
            let stripes = stripes.take_while(|&stripes| as_f64(stripes) <= self.chunks());
            stripes.map(move |stripes| self.spread(source, store, groups, stripes))
        });
        let outcomes: Vec<_> = outcomes.collect();
        let least = quickest(&outcomes)?.seconds;
        outcomes.into_iter().find(|outcome| outcome.seconds <= least * (1.0 + WORTHWHILE))
    }

    fn spread(&self, source: Way, store: Storage, groups: u64, stripes: u64) -> Outcome {
        let hops = levels_below(self.hosts.div_ceil(groups), stripes);
        let (rate, limit) = self.feed(store, stripes, groups);
        let (_, limit) = slowest(&[(rate, limit), (self.gpu_rate(), Limit::GpuLink)]);
        // A stripe gets its share of the feed. A node hands a chunk to its children in turn; since the feed is no faster than
        // a card, it is done with one chunk before the next comes, and hops only delay.
        let turn = self.chunk() * as_f64(stripes) / self.nic;
        let first = self.chunk() * as_f64(stripes) / rate + as_f64(hops) * turn;
        let wave = Wave { first, ..self.wave(rate) };
        let outcome = self.outcome(Way::Peers, self.on_gpus(wave), limit, groups);
        Outcome { from: Some(source), spread: Some(Spread { groups, stripes, hops }), ..outcome }
    }
}

/// The first of the least.
fn slowest(rates: &[(f64, Limit)]) -> (f64, Limit) {
    let least = |a: (f64, Limit), b: &(f64, Limit)| if b.0 < a.0 { *b } else { a };
    rates.iter().fold((f64::INFINITY, Limit::GpuLink), least)
}

fn powers_of_two() -> impl Iterator<Item = u64> {
    (0..63).map(|power| 1 << power)
}

/// Levels below the root of a tree of `nodes` nodes that have `children` children each.
fn levels_below(nodes: u64, children: u64) -> u64 {
    if children <= 1 {
        return nodes.saturating_sub(1);
    }
    let (mut levels, mut level, mut reached) = (0, 1_u64, 1_u64);
    while reached < nodes {
        level = level.saturating_mul(children);
        reached = reached.saturating_add(level);
        levels += 1;
    }
    levels
}
