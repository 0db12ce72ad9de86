//! File descriptors of this process: one per peer and per open file.

/// Raises the file descriptor limit of this process as far as the system permits. Each peer and
/// each open file takes a descriptor.
///
/// # Example
/// ```
/// halocline_core::support::raise_descriptor_limit();
/// ```
pub fn raise_descriptor_limit() {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

        let limit = getrlimit(Resource::Nofile);
        let raised = Rlimit {
            current: limit.maximum,
            ..limit
        };
        // If refused, the old limit stays; the error for a missing descriptor names it.
        let _ = setrlimit(Resource::Nofile, raised);
    }
}

/// Text of a system error, with the remedy if descriptors have run out.
pub(crate) fn explained(error: &std::io::Error) -> String {
    #[cfg(unix)]
    {
        use rustix::io::Errno;

        if matches!(
            Errno::from_io_error(error),
            Some(Errno::MFILE | Errno::NFILE)
        ) {
            return format!(
                "{error}: each rank takes one descriptor for each other rank; raise the limit (ulimit -n)"
            );
        }
    }
    error.to_string()
}
