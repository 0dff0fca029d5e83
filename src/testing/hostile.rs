//! Makes weight files byte by byte: well-formed ones, and ones that no honest writer would produce.
//!
//! It checks nothing on purpose, and shares no code with the parser that its files are for.

use std::fmt::Write;

/// A weight file of that header text and those data bytes; the length field is the text's.
pub fn file(header: &str, data: &[u8]) -> Vec<u8> {
    file_claiming(header.len() as u64, header.as_bytes(), data)
}

/// A weight file whose length field says `claimed`, whatever the header's length is.
pub fn file_claiming(claimed: u64, header: &[u8], data: &[u8]) -> Vec<u8> {
    [&claimed.to_le_bytes()[..], header, data].concat()
}

/// One member of a header: `"name":{"dtype":…,"shape":…,"data_offsets":…}`. The name is written as it is.
pub fn entry(name: &str, dtype: &str, shape: &[u64], begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#)
}

/// A header of those members.
pub fn header(members: &[String]) -> String {
    format!("{{{}}}", members.join(","))
}

/// A well-formed file of U8 vectors: names and their bytes, in that order.
pub fn bytes_file(tensors: &[(&str, &[u8])]) -> Vec<u8> {
    let mut at = 0;
    let members: Vec<String> = tensors
        .iter()
        .map(|(name, data)| {
            let begin = at;
            at += data.len() as u64;
            entry(name, "U8", &[data.len() as u64], begin, at)
        })
        .collect();
    file(&header(&members), &tensors.iter().flat_map(|(_, data)| data.iter().copied()).collect::<Vec<_>>())
}

/// An `index.json` of those tensors and files; both are written as they are.
pub fn index(map: &[(&str, &str)]) -> String {
    let mut text = String::from(r#"{"metadata":{"total_size":0},"weight_map":{"#);
    for (at, (tensor, file)) in map.iter().enumerate() {
        // Writing to a string cannot fail.
        let _ = write!(text, r#"{}"{tensor}":"{file}""#, if at == 0 { "" } else { "," });
    }
    text + "}}"
}
