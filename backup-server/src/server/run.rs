//! Starting and stopping everything.

use super::config::Config;
use super::exports::{self, Exports};
use super::machines::Machines;
use super::registry::{Registry, RegistryError};
use super::snapshots::Snapshots;
use super::views::Views;
use super::{control, listener, metrics};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// How long a starting server waits for the data directory.
const LOCK_PATIENCE: Duration = Duration::from_secs(3);

/// What the process is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Hosts connect to it.
    Serve,
    /// Only the command line does: there is no server, and a group is to be recovered.
    Alone,
}

/// Why the server does not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The data directory.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A certificate.
    #[error(transparent)]
    Tls(#[from] tidelock_tls::TlsError),
    /// An address, a socket, or the directory of one.
    #[error("cannot use {on}: {source}")]
    Listen {
        /// Which.
        on: String,
        /// Why.
        source: io::Error,
    },
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    registry: Arc<Registry>,
    exports: Arc<Exports>,
    views: Arc<Views>,
    snapshots: Arc<Snapshots>,
    address: Option<SocketAddr>,
    stop: watch::Sender<bool>,
    hosts: Option<JoinHandle<()>>,
    others: Vec<JoinHandle<()>>,
}

/// Two or three files are open for each segment of a journal: as many as this process may have.
fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!("the limit of open files stays as it is: {error}");
    }
}

impl Server {
    /// Starts. Recovered groups are offered again at once.
    pub async fn start(config: Config, role: Role) -> Result<Self, StartError> {
        if let (super::config::Security::Tls(files), Role::Serve) = (&config.security, role) {
            // What would be refused at each connection is told now.
            match files.load()?.backup_config(std::time::SystemTime::now()) {
                // What was recovered here must still be served, and a new certificate needs no restart.
                Err(error @ tidelock_tls::TlsError::Expired { .. }) => {
                    tracing::error!(
                        "no host can connect until there is another certificate: {error}"
                    );
                }
                checked => drop(checked?),
            }
        }
        if let Some(valid) = config.certificate_valid_for()
            && role == Role::Serve
            && !valid.is_zero()
            && valid < super::config::CERTIFICATE_WARN
        {
            let days = valid.as_secs() / 86_400;
            tracing::warn!(days, "the certificate ends soon, and no host can connect then");
        }
        raise_open_files();
        let registry = Arc::new(open(&config, role).await?);
        let exports = Arc::new(Exports::new(Arc::clone(&registry)));
        let listen = |on: String| move |source| StartError::Listen { on, source };
        let exports_dir = config.exports_dir.display().to_string();
        exports::remove_stale(&config.exports_dir).map_err(listen(exports_dir.clone()))?;
        let views_dir = config.views_dir.display().to_string();
        let views = Views::new(Arc::clone(&exports), &config.views_dir);
        let views = Arc::new(views.map_err(listen(views_dir))?);
        let snapshots_dir = config.snapshots_dir.display().to_string();
        let snapshots = Snapshots::open(&registry, role == Role::Serve);
        let snapshots = snapshots.map_err(listen(snapshots_dir))?;
        let mut others = Vec::new();
        for owner in registry.all() {
            let exports = Arc::clone(&exports);
            // A long journal is opened in the background and keeps no other group waiting.
            others.push(tokio::spawn(async move {
                match exports.offer(&owner.group).await {
                    Ok(Some(disks)) => {
                        tracing::info!(group = &*owner.group, ?disks, "recovered disks offered");
                    }
                    Ok(None) => {}
                    Err(error) => tracing::error!(group = &*owner.group, "exports: {error}"),
                }
            }));
        }
        let guests_dir = config.data_dir.join("guests").display().to_string();
        let machines = Machines::open(Arc::clone(&registry), Arc::clone(&exports)).await;
        let machines = machines.map_err(listen(guests_dir))?;
        let control = bind_control(&config)?;
        let (stop, stopping) = watch::channel(false);
        let mut server = Self {
            registry: Arc::clone(&registry),
            exports: Arc::clone(&exports),
            views: Arc::clone(&views),
            snapshots: Arc::clone(&snapshots),
            address: None,
            stop,
            hosts: None,
            others,
        };
        server.others.push(tokio::spawn(control::run(
            control,
            Arc::clone(&registry),
            Arc::clone(&exports),
            views,
            Arc::clone(&snapshots),
            machines,
        )));
        if role == Role::Serve {
            server.others.push(tokio::spawn(snapshots.tend()));
            let on = || listen(config.listen.to_string());
            let hosts = TcpListener::bind(config.listen).await.map_err(on())?;
            server.address = Some(hosts.local_addr().map_err(on())?);
            let run = listener::run(hosts, Arc::clone(&registry), stopping);
            server.hosts = Some(tokio::spawn(run));
            if let Some(address) = config.metrics {
                let on = listen(address.to_string());
                let http = TcpListener::bind(address).await.map_err(on)?;
                server.others.push(tokio::spawn(metrics::run(http, Arc::clone(&registry))));
            }
        }
        if let Some(address) = config.exports_tcp {
            let nbd = TcpListener::bind(address).await.map_err(listen(address.to_string()))?;
            server.others.push(tokio::spawn(exports::run_tcp(nbd, Arc::clone(&registry))));
        }
        Ok(server)
    }

    /// Where hosts connect to.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Stops: what was received is made durable and acknowledged, hosts are told, and the
    /// journals end cleanly.
    pub async fn stop(mut self) {
        // They only read: what they have is kept, and they go on another time.
        let snapshots = Arc::clone(&self.snapshots);
        let _ = tokio::task::spawn_blocking(move || snapshots.stop()).await;
        let registry = Arc::clone(&self.registry);
        self.registry.stores().views().close_all().await;
        // The owners first: their last acknowledgements still go out.
        let _ = tokio::task::spawn_blocking(move || registry.stop()).await;
        self.stop.send_replace(true);
        if let Some(hosts) = self.hosts.take() {
            let _ = hosts.await;
        }
        self.views.close_all();
        self.exports.close();
        self.others.iter().for_each(JoinHandle::abort);
        let _ = std::fs::remove_file(&self.registry.config().control);
    }
}

/// A command that found no server may hold the data directory for a moment.
async fn open(config: &Config, role: Role) -> Result<Registry, RegistryError> {
    let patience = match role {
        Role::Serve => LOCK_PATIENCE,
        Role::Alone => Duration::ZERO,
    };
    let since = Instant::now();
    loop {
        match Registry::open(config.clone(), role) {
            Err(RegistryError::InUse { .. }) if since.elapsed() < patience => {
                sleep(Duration::from_millis(50)).await;
            }
            opened => return opened,
        }
    }
}

fn bind_control(config: &Config) -> Result<UnixListener, StartError> {
    use std::os::unix::fs::PermissionsExt;
    let path = &config.control;
    let bind = || {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        // The data directory is locked, so whoever left it there is gone.
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(listener)
    };
    bind().map_err(|source| StartError::Listen { on: path.display().to_string(), source })
}
