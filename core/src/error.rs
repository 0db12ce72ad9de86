//! Errors, and how they pass through functions that return only tensors.

use std::cell::Cell;
use std::error::Error as StdError;
use std::fmt;

/// Result type of everything in Halocline that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error type of Halocline: each error names the cause, the place, and the remedy.
///
/// # Example
/// ```
/// use halocline_core::{Error, Launcher};
///
/// let result = Launcher::local(2).run(|world| world.mesh([("lat", 3)]).map(drop));
/// let error = result.unwrap_err();
/// assert!(matches!(error, Error::Mesh(_)));
/// assert!(error.to_string().contains("multiply to 3, but there are 2 ranks"));
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A mesh that cannot be built, or an axis that it does not have.
    #[error("mesh: {0}")]
    Mesh(String),
    /// A layout whose placements, extents or shape do not fit together.
    #[error("layout: {0}")]
    Layout(String),
    /// A plan that does not fit its model or mesh. Nothing was placed.
    #[error("plan: {0}")]
    Plan(String),
    /// An operator has no rule for a placement. Nothing was communicated.
    #[error("{operator}: no rule for {placement}; {help}")]
    Placement {
        /// The operator that was called.
        operator: String,
        /// The placement that it cannot work on, or the layouts that it cannot combine, with their
        /// axes.
        placement: String,
        /// The redistribution that makes the call work.
        help: String,
    },
    /// An operator was called with invalid arguments.
    #[error("{operator}: {message}")]
    Operator {
        /// The operator that was called.
        operator: String,
        /// The mistake, with expected and found values.
        message: String,
    },
    /// A message did not arrive in time.
    #[error(
        "rank {rank}: {operation}: nothing from rank {peer} within {seconds} s, expected {expected}; \
         is rank {peer} in another operation, or slower than the timeout (HALOCLINE_TIMEOUT or Launcher::timeout)?"
    )]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// The operator and layout of the wait.
        operation: String,
        /// The rank that it waited for.
        peer: usize,
        /// The shapes that it waited for.
        expected: String,
        /// The time waited, in seconds.
        seconds: f64,
    },
    /// Two ranks communicated in different operations.
    #[error("ranks diverged: rank {rank} is in {operation}, rank {peer} is in {peer_operation}")]
    Diverged {
        /// The rank that detected it.
        rank: usize,
        /// Its operation.
        operation: String,
        /// The other rank.
        peer: usize,
        /// The other rank's operation.
        peer_operation: String,
    },
    /// Another rank ended, so this one cannot continue.
    #[error("rank {rank}: {operation}: stopped because rank {peer} {cause}")]
    PeerEnded {
        /// The rank that stopped.
        rank: usize,
        /// Its operation.
        operation: String,
        /// The rank that ended first.
        peer: usize,
        /// Why that rank ended.
        cause: String,
    },
    /// The program of a rank failed, which ended the job. An error that all local ranks return is
    /// not wrapped.
    #[error("rank {rank} failed: {cause}")]
    Rank {
        /// The rank that failed first.
        rank: usize,
        /// Its error or the message of its panic.
        cause: String,
    },
    /// The device of a rank did not finish its work.
    #[error(
        "rank {rank}: its device failed before the work of the program was done: {cause}; is its memory used up, so that \
         a smaller batch or more ranks help, or has another process of the job ended?"
    )]
    Device {
        /// The rank whose device failed.
        rank: usize,
        /// The message of the driver.
        cause: String,
    },
    /// Replicas of a module or a tensor that should be equal are not.
    #[error("{0}")]
    Replicas(String),
    /// A failure of the engine or of its environment.
    #[error("engine: {0}")]
    Engine(String),
    /// An error of the program or of another library.
    #[error(transparent)]
    Other(#[from] Box<dyn StdError + Send + Sync>),
}

impl fmt::Debug for Error {
    /// Prints the message, so that a `main` that returns an error ends with a readable sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

thread_local! {
    /// Depth of nested calls of [`Error::catch`] on this thread.
    static CATCHING: Cell<usize> = const { Cell::new(0) };
}

impl Error {
    /// Wraps an error of the program or of another library, so that `?` can return it as this type.
    pub fn other(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::Other(error.into())
    }

    /// Makes an [`Error::Operator`].
    pub fn operator(operator: &str, message: impl Into<String>) -> Self {
        Self::Operator {
            operator: operator.into(),
            message: message.into(),
        }
    }

    /// Makes an [`Error::Placement`].
    ///
    /// # Example
    /// ```
    /// use halocline_core::Error;
    ///
    /// let error = Error::placement("fft", "Shard(1) on axis \"x\"", "redistribute it");
    /// assert_eq!(error.to_string(), "fft: no rule for Shard(1) on axis \"x\"; redistribute it");
    /// ```
    pub fn placement(
        operator: &str,
        placement: impl Into<String>,
        help: impl Into<String>,
    ) -> Self {
        Self::Placement {
            operator: operator.into(),
            placement: placement.into(),
            help: help.into(),
        }
    }

    /// Panics with this error.
    ///
    /// A programming mistake panics with its message, as in burn. A communication failure, or
    /// replicas that differ, keeps its type as the panic payload, which the launcher reports; this
    /// carries it through a backward pass, whose functions return only tensors. Within
    /// [`Error::catch`] every error keeps its type.
    ///
    /// # Panics
    /// Always.
    ///
    /// # Example
    /// ```
    /// use halocline_core::Error;
    ///
    /// let raised = Error::catch::<()>(|| Error::operator("scale", "no factor").raise());
    /// assert_eq!(raised.unwrap_err().to_string(), "scale: no factor");
    /// ```
    #[track_caller]
    pub fn raise(self) -> ! {
        match self {
            _ if CATCHING.get() > 0 => std::panic::resume_unwind(Box::new(self)),
            Self::Timeout { .. }
            | Self::Replicas(_)
            | Self::Diverged { .. }
            | Self::PeerEnded { .. }
            | Self::Rank { .. }
            | Self::Device { .. }
            | Self::Engine(_) => std::panic::resume_unwind(Box::new(self)),
            mistake => panic!("{mistake}"),
        }
    }

    /// Runs `f` and returns an error that was [raised](Error::raise) in it; other panics propagate.
    ///
    /// # Errors
    /// The error that was raised.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Error, Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("x", 2)])?;
    ///     let [x, y] = [[4, 6], [4, 5]].map(|shape| ShardTensor::<2>::ones(shape, &mesh, &[Shard(0)]));
    ///     let (x, y) = (x?, y?);
    ///     let error = Error::catch(|| x + y).unwrap_err();
    ///     assert!(error.to_string().contains("do not broadcast"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn catch<T>(f: impl FnOnce() -> T) -> Result<T> {
        CATCHING.set(CATCHING.get() + 1);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
        CATCHING.set(CATCHING.get() - 1);
        result.map_err(|payload| match payload.downcast::<Error>() {
            Ok(error) => *error,
            Err(payload) => std::panic::resume_unwind(payload),
        })
    }
}

mod sealed {
    /// Private supertrait, so that [`Result`] alone implements `OrRaise`.
    pub trait Sealed {}

    impl<T> Sealed for super::Result<T> {}
}

/// Unwraps results in functions that panic. Only [`Result`] implements it.
pub trait OrRaise<T>: sealed::Sealed {
    /// Returns the value.
    ///
    /// # Panics
    /// [Raises](Error::raise) the error, reported at the caller's location.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Error, OrRaise};
    ///
    /// assert_eq!(Ok::<_, Error>(2).or_raise(), 2);
    /// let failed = || Err::<i32, _>(Error::operator("scale", "no factor")).or_raise();
    /// assert_eq!(Error::catch(failed).unwrap_err().to_string(), "scale: no factor");
    /// ```
    fn or_raise(self) -> T;
}

impl<T> OrRaise<T> for Result<T> {
    #[track_caller]
    fn or_raise(self) -> T {
        match self {
            Ok(value) => value,
            Err(error) => error.raise(),
        }
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::other(error)
    }
}
