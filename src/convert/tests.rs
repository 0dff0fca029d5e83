//! The conversions against arithmetic written another way.
