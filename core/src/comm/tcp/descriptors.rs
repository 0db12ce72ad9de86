//! Descriptors of this process, of which each peer takes one.

/// Has the system give this process as many descriptors as it may have.
#[cfg(unix)]
pub(super) fn raise_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // A system that refuses leaves the limit as it was; the error of a descriptor that is missing names it.
    let _ = setrlimit(Resource::Nofile, raised);
}

#[cfg(not(unix))]
pub(super) fn raise_limit() {}

/// An error of the system, with what to do about it if descriptors have run out.
pub(super) fn explained(error: &std::io::Error) -> String {
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
