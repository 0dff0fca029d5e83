//! Which file system a file lies on, and what that means for reading: over a network, in memory, or neither.
//!
//! A table of magic numbers; only FUSE is looked up further. Nothing here reads the file.

use std::fs::File;
use std::os::fd::AsFd;

use super::port::FileSystem;
use crate::os;

/// What is special about reading from a kind of file system.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Disk,
    Network,
    Memory,
}

const FUSE: u64 = 0x6573_5546;

/// Magic numbers as `statfs` gives them.
const TABLE: &[(u64, &str, Kind)] = &[
    (0xef53, "ext4", Kind::Disk),
    (0x5846_5342, "xfs", Kind::Disk),
    (0x9123_683e, "btrfs", Kind::Disk),
    (0x2fc1_2fc1, "zfs", Kind::Disk),
    (0xf2f5_2010, "f2fs", Kind::Disk),
    (0xca45_1a4e, "bcachefs", Kind::Disk),
    (0x794c_7630, "overlay", Kind::Disk),
    (0x7371_7368, "squashfs", Kind::Disk),
    (0xe0f5_e1e2, "erofs", Kind::Disk),
    (0x2011_bab0, "exfat", Kind::Disk),
    (0x4d44, "vfat", Kind::Disk),
    (0x9660, "iso9660", Kind::Disk),
    (0x0102_1994, "tmpfs", Kind::Memory),
    (0x8584_58f6, "ramfs", Kind::Memory),
    (0x9584_58f6, "hugetlbfs", Kind::Memory),
    (0x6969, "nfs", Kind::Network),
    (0xff53_4d42, "cifs", Kind::Network),
    (0xfe53_4d42, "smb2", Kind::Network),
    (0x517b, "smb", Kind::Network),
    (0x0102_1997, "9p", Kind::Network),
    (0x0bd0_0bd0, "lustre", Kind::Network),
    (0x4750_4653, "gpfs", Kind::Network),
    (0x00c3_6400, "ceph", Kind::Network),
    (0x1983_0326, "beegfs", Kind::Network),
    (0x2003_0528, "orangefs", Kind::Network),
    (0x5346_414f, "afs", Kind::Network),
    (0x0116_1970, "gfs2", Kind::Network),
    (0x7461_636f, "ocfs2", Kind::Network),
    (FUSE, "fuse", Kind::Network),
];

/// The file system of an open file. An unknown one counts as a disk, under its number.
pub(super) fn of(file: &File, device: u64) -> FileSystem {
    let Ok(magic) = os::file_system_magic(file.as_fd()) else { return named("unknown", Kind::Disk) };
    match TABLE.iter().find(|(known, ..)| *known == magic) {
        Some((FUSE, name, kind)) => named(&fuse_name(device).unwrap_or_else(|| (*name).to_owned()), *kind),
        Some((_, name, kind)) => named(name, *kind),
        None => named(&format!("{magic:#x}"), Kind::Disk),
    }
}

fn named(name: &str, kind: Kind) -> FileSystem {
    FileSystem { name: name.to_owned(), network: kind == Kind::Network, memory: kind == Kind::Memory }
}

/// FUSE has one magic for all its servers and for virtiofs; the mount table tells them apart.
fn fuse_name(device: u64) -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    name_in_mounts(&mounts, rustix::fs::major(device), rustix::fs::minor(device))
}

fn name_in_mounts(mounts: &str, major: u32, minor: u32) -> Option<String> {
    let device = format!("{major}:{minor}");
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&device))?;
    let (_, after) = line.split_once(" - ")?;
    after.split(' ').next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_magic_number_is_listed_once() {
        let mut magics: Vec<_> = TABLE.iter().map(|(magic, ..)| magic).collect();
        magics.sort_unstable();
        magics.dedup();
        assert_eq!(magics.len(), TABLE.len());
    }

    #[test]
    fn files_of_this_machine_have_a_file_system() {
        let file = tempfile::tempfile().unwrap();
        let found = of(&file, file.metadata().unwrap().dev());
        assert!(!found.name.is_empty());
        assert!(!(found.network && found.memory));
    }

    #[test]
    fn the_mount_table_names_the_server_of_a_fuse_mount() {
        let mounts = "36 35 98:0 /a /mnt1 rw,noatime master:1 - ext3 /dev/root rw\n\
                      37 35 0:44 / /mnt2 rw,nosuid shared:7 - fuse.sshfs user@host: rw\n\
                      38 35 0:45 / /m\\040x rw - virtiofs share rw\n";
        assert_eq!(name_in_mounts(mounts, 0, 44).as_deref(), Some("fuse.sshfs"));
        assert_eq!(name_in_mounts(mounts, 0, 45).as_deref(), Some("virtiofs"));
        assert_eq!(name_in_mounts(mounts, 0, 46), None);
    }
}
