//! What a file was at some moment: one that is no longer the same must not be mixed with what was read before.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

/// The version of a file, to be compared with another one of the same place. It states the length; what else tells versions apart
/// is the storage's business: device, inode and modification time of a local file, a tag of an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Version {
    len: u64,
    kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Kind {
    File { device: u64, inode: u64, modified_ns: i128 },
    Tag(Arc<str>),
}

impl Version {
    /// The version of a local file.
    pub fn of_file(meta: &Metadata) -> Version {
        let modified_ns = i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec());
        Version { len: meta.len(), kind: Kind::File { device: meta.dev(), inode: meta.ino(), modified_ns } }
    }

    /// The version of an object of `len` bytes that its storage tells apart by a tag, as an ETag.
    pub fn tagged(len: u64, tag: impl Into<Arc<str>>) -> Version {
        Version { len, kind: Kind::Tag(tag.into()) }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of the device that a local file lies on; 0 for any other.
    pub(crate) fn device(&self) -> u64 {
        match self.kind {
            Kind::File { device, .. } => device,
            Kind::Tag(_) => 0,
        }
    }

    /// Whether both are versions of one file, which may have been written to.
    pub(crate) fn is_same_file(&self, other: &Version) -> bool {
        match (&self.kind, &other.kind) {
            (Kind::File { device, inode, .. }, Kind::File { device: other_device, inode: other_inode, .. }) => {
                (device, inode) == (other_device, other_inode)
            }
            _ => self == other,
        }
    }

    /// What differs between this (earlier) and `now`, with both values; `None` when nothing does.
    pub fn difference(&self, now: &Version) -> Option<String> {
        if let (Kind::File { inode, .. }, Kind::File { inode: inode_now, .. }) = (&self.kind, &now.kind)
            && !self.is_same_file(now)
        {
            return Some(format!("replaced: inode {inode} before, {inode_now} now"));
        }
        if self.len != now.len {
            return Some(format!("size {} bytes before, {} now", self.len, now.len));
        }
        match (&self.kind, &now.kind) {
            (before, after) if before == after => None,
            (Kind::File { modified_ns: before, .. }, Kind::File { modified_ns: after, .. }) => {
                Some(format!("modified at {before} ns before, at {after} ns now"))
            }
            (Kind::Tag(before), Kind::Tag(after)) => Some(format!("version {before} before, {after} now")),
            _ => Some("another kind of storage now".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_says_both_values() {
        let (one, two) = (Version::tagged(5, "a"), Version::tagged(5, "b"));
        assert_eq!(one.difference(&one.clone()), None);
        assert_eq!(one.difference(&two).unwrap(), "version a before, b now");
        assert_eq!(one.difference(&Version::tagged(6, "a")).unwrap(), "size 5 bytes before, 6 now");
        let file = tempfile::NamedTempFile::new().unwrap();
        let before = Version::of_file(&file.as_file().metadata().unwrap());
        file.as_file().set_len(3).unwrap();
        let after = Version::of_file(&file.as_file().metadata().unwrap());
        assert!(before.is_same_file(&after));
        assert_eq!(before.difference(&after).unwrap(), "size 0 bytes before, 3 now");
        let other = tempfile::NamedTempFile::new().unwrap();
        let other = Version::of_file(&other.as_file().metadata().unwrap());
        assert!(before.difference(&other).unwrap().starts_with("replaced: inode"));
        assert!(before.difference(&one).is_some());
    }
}
