//! The end of a process that has broken an invariant.

/// Makes every panic end the whole process, after its message, by SIGABRT.
///
/// A crash is safe at any instruction (rule 9). A thread that has died among others that live on is not: nobody would
/// notice that its part of the work has stopped. The profile's `panic = "abort"` does the same, but then tests, which
/// need unwinding, would have to compile all dependencies once more.
pub fn abort_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        std::process::abort();
    }));
}
