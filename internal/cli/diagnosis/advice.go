package diagnosis

// troubleshooting is the page with a section for each problem.
const troubleshooting = "docs/troubleshooting.md"

// advice is the remedy for a condition.
type advice struct {
	do string
	// section of docs/troubleshooting.md.
	section string
}

// none: the condition ends without a user.
const none = "nothing; this ends by itself"

// adviceByReason contains the reasons of Capstan's conditions that can block a user. Reasons of Cluster API summarize other
// objects, so they have no advice of their own.
var adviceByReason = map[string]advice{
	// hosts
	"Connecting":          {none, "a-host-is-not-connected"},
	"Unreachable":         {"check capstand on the host: `systemctl status capstand` or `capstan status`, and the network between the manager and the address of the host", "a-host-is-not-connected"},
	"CredentialsInvalid":  {"let a host that joined join again, with a token of `capstan host token create --name HOST`; on another host, run `capstan host credentials`, and apply its output", "a-host-is-not-connected"},
	"Draining":            {"wait until the machines are replaced, or look for a Machine that cannot be drained", "a-host-is-not-drained"},
	"RebootDraining":      {"wait until the machines are replaced, or look for a Machine that cannot be drained", "a-host-is-not-drained"},
	"RebootWaiting":       {"remove the objects that the message names", "a-host-does-not-reboot"},
	"Rebooting":           {"wait until the host is back, or look at its console", "a-host-does-not-reboot"},
	"RebootUnsupported":   {"upgrade capstand on the host, or drain and reboot the host by hand", "a-host-does-not-reboot"},
	"InUse":               {"delete or move the machines of the host, or annotate a permanently lost host as docs/host-loss.md describes", "a-host-is-not-drained"},
	"NoHosts":             {"create a CapstanHost that the namespace may use", "no-host-for-a-machine"},
	"IncompatibleVersion": {"upgrade the part that the message names", "a-host-is-not-connected"},
	"TunnelBroken":        {"give the host its tunnel address again, or raise the MTU of the interface, as the message says", "a-host-has-lost-its-tunnel"},
	"FencingPending":      {none, "a-host-does-not-acknowledge-fencing"},
	"FencingUnsupported":  {"upgrade capstand on the host, or remove spec.fencing", "a-host-does-not-acknowledge-fencing"},
	"FencingConflict":     {"set spec.fencing only in one CapstanHost of the host", "a-host-does-not-acknowledge-fencing"},
	"NoHostConnected":     {"repair the connection of a host: `capstan describe host NAME`", "a-host-is-not-connected"},

	// clusters and machines
	"NoHost":                  {"add a host, free memory or CPUs, change the hostSelector, or allow the namespace on a host", "no-host-for-a-machine"},
	"WaitingForVolume":        {"follow the message: let the rollout delete first, repair the host of the volume, or delete the CapstanVolume to start with an empty one", "a-machine-waits-for-its-volume"},
	"Pending":                 {none, "a-machine-waits-for-its-volume"},
	"HostNotFound":            {"create the CapstanHost again, or delete the Machine", "a-host-is-lost"},
	"HostNotAllowed":          {"allow the namespace in spec.allowedNamespaces of the host", "no-host-for-a-machine"},
	"HostUnreachable":         {"repair the connection of the host: `capstan describe host NAME`", "a-host-is-not-connected"},
	"WaitingForTurn":          {"restart capstand on the host that the message names, or look for the cause in its log", "a-machine-waits-for-its-host"},
	"HostMismatch":            {"restore the host with its state, or abandon the machine as docs/host-loss.md describes", "a-host-is-lost"},
	"NetworkInvalid":          {"choose a machineCIDR that the message permits", "the-network-of-a-cluster"},
	"NoFreeNetwork":           {"set spec.network.machineCIDR of the CapstanCluster, or give the hosts more networks", "the-network-of-a-cluster"},
	"LANNotOffered":           {"offer the LAN to the namespace in spec.lanNetworks of a host, or correct spec.network.lan of a new cluster", "the-network-of-a-cluster"},
	"NetworkRefused":          {"remove the conflict that the message names from the host, or choose another machineCIDR", "the-network-of-a-cluster"},
	"WaitingForEndpoint":      {"set spec.controlPlaneEndpoint, or wait for the controller that sets it", "the-endpoint-of-a-cluster"},
	"LoadBalancerNotServing":  {"wait for the first API server; then look at the control plane machines", "the-endpoint-of-a-cluster"},
	"PreparingFirstMachine":   {"look at the conditions of the CapstanControlPlane; machines boot after ten seconds in any case", "a-control-plane-does-not-answer"},
	"WaitingForOtherClusters": {none, "the-endpoint-of-a-cluster"},
	"LoadBalancerRefused":     {"free the address and port that the message names", "the-endpoint-of-a-cluster"},
	"NoFreeAddress":           {"use a larger machineCIDR for a new cluster, or delete machines", "addresses"},
	"WaitingForIPAddress":     {"look at the pool: `capstan describe pool NAME`", "addresses"},
	"AddressInvalid":          {"use a pool with addresses in the network of the cluster; for an endpoint outside of it, list the addresses in spec.virtualAddresses of the hosts", "addresses"},
	"MachineStarting":         {none, "a-machine-does-not-start"},
	"MachineRestarting":       {"read its log on the host: `capstan logs MACHINE`", "a-machine-does-not-start"},
	"MachineFailed":           {"read its log on the host: `capstan logs MACHINE`; then delete the Machine, or let a MachineHealthCheck replace it", "a-machine-does-not-start"},
	"MachineLost":             {"its disk is lost: delete the Machine, or let a MachineHealthCheck replace it", "a-machine-does-not-start"},
	"MachineFenced":           {"repair the network of its host; the machine starts when a manager confirms it", "a-host-is-lost"},
	"ServicesNotPublished":    {"remove the cause that the message names", "a-service-has-no-address"},
	"ServicesEnding":          {"repair the connection that the message names", "a-service-has-no-address"},
	"WorkloadNotConnected":    {"look at the control plane machines", "a-service-has-no-address"},
	"NotApplied":              {"correct the manifest, or create the objects that it needs", "a-manifest-is-not-applied"},
	"MachineRefused":          {"remove the cause that the message names", "a-host-refuses-a-machine"},
	"BootstrapRunning":        {none, "a-machine-does-not-become-a-node"},
	"BootstrapStalled":        {"read the message and its log on the host: `capstan logs MACHINE`; a slow machine needs only time", "a-machine-does-not-become-a-node"},
	"BootstrapFailed":         {"read its log on the host: `capstan logs MACHINE`; correct the CapstanConfig and replace the Machine", "a-machine-does-not-become-a-node"},
	"ServicesStarting":        {none, "a-machine-does-not-become-a-node"},
	"ServicesUnhealthy":       {"read the log of the service on the host: `capstan logs MACHINE SERVICE`", "a-machine-does-not-become-a-node"},
	"DeletionBlocked":         {"remove the cause that the message names; the object is removed afterwards", "an-object-is-not-deleted"},

	// updates
	"NoCapacity":             {"free memory, CPUs or disk on the host of the machine", "an-update-does-not-proceed"},
	"WaitingForUpdate":       {none, "an-update-does-not-proceed"},
	"UpdateHeld":             {none, "an-update-does-not-proceed"},
	"UpdateRunning":          {none, "an-update-does-not-proceed"},
	"Updating":               {none, "an-update-does-not-proceed"},
	"UpdateRefused":          {"remove the cause that the message names", "an-update-does-not-proceed"},
	"UpdateFailed":           {"the machine has returned to its former version: read the message, correct the spec, or permit replacement", "an-update-does-not-proceed"},
	"ChangeFailed":           {"remove the cause that the message names", "an-update-does-not-proceed"},
	"CannotUpdateInPlace":    {"permit replacement with the strategy Prefer or Never, or revert the field that the message names", "an-update-does-not-proceed"},
	"CannotChangeMachines":   {"remove the cause that the message names", "an-update-does-not-proceed"},
	"WaitingForControlPlane": {"upgrade the control plane first", "an-update-does-not-proceed"},
	"VersionNotAvailable":    {"install this Kubernetes version on the hosts, or choose one of `capstan top hosts`", "an-update-does-not-proceed"},

	// specs
	"InvalidReplicas":      {"correct the spec as the message says", "an-invalid-spec"},
	"InvalidFailureDomain": {"correct the spec as the message says", "an-invalid-spec"},
	"InvalidVersion":       {"correct the spec as the message says", "an-invalid-spec"},
	"InvalidRollingUpdate": {"correct the spec as the message says", "an-invalid-spec"},
	"InvalidConfiguration": {"correct the spec as the message says", "an-invalid-spec"},
	"InvalidSpec":          {"correct the spec as the message says", "an-invalid-spec"},

	// bootstrap data
	"NotAvailable":                      {"look at the other conditions of the object", "a-machine-does-not-become-a-node"},
	"WaitingForControlPlaneEndpoint":    {"wait for the endpoint of the cluster", "the-endpoint-of-a-cluster"},
	"WaitingForControlPlaneInitialized": {"look at the first control plane machine", "a-control-plane-does-not-answer"},
	"CertificatesNotAvailable":          {"create the Secrets with the certificate authorities, or let the control plane create them", "certificates"},
	"ReferencedSecretNotAvailable":      {"create the Secret that the message names", "an-invalid-spec"},
	"WaitingForConnection":              {none, "a-machine-does-not-become-a-node"},

	// certificates
	"CertificatesExpiring": {"look for the machine, host or node agent that does not run: it renews its certificates by itself; renew an authority or a certificate of your own as docs/certificates.md describes", "certificates-expire"},

	// control planes
	"NotInitialized":            {"look at the other conditions of the object", "a-control-plane-does-not-answer"},
	"WaitingForAPIServer":       {"look at the first control plane machine", "a-control-plane-does-not-answer"},
	"ConnectionDown":            {"check the endpoint and the control plane machines", "a-control-plane-does-not-answer"},
	"KubeconfigRefused":         {"replace the kubeconfig Secret with one of the form that the message describes", "certificates"},
	"NotOwned":                  {"rotate the authority with the tool that created its Secret", "certificates"},
	"TrustingNew":               {none, "certificates"},
	"SigningNew":                {none, "certificates"},
	"DroppingOld":               {none, "certificates"},
	"NotHealthy":                {"look at the conditions of the machines", "a-control-plane-does-not-answer"},
	"HealthUnknown":             {"check the endpoint and the control plane machines", "a-control-plane-does-not-answer"},
	"QuorumLost":                {"repair control plane machines, or restore a backup as docs/backup.md describes", "etcd-has-no-quorum"},
	"QuorumAtRisk":              {"wait for the other members; no member leaves before", "etcd-has-no-quorum"},
	"RemediationDeferred":       {none, "a-machine-is-not-repaired"},
	"CannotBeRemediated":        {"repair the part that the message names; replacing this machine would not help", "a-machine-is-not-repaired"},
	"MachineDeleting":           {none, "a-machine-is-not-repaired"},
	"WaitingForWorkersDeletion": {none, "an-object-is-not-deleted"},
	"WaitingForMachineDeletion": {none, "an-object-is-not-deleted"},

	// backups
	"Failed":             {"remove the cause that the message names; the next attempt comes by itself", "backups"},
	"NoBackupYet":        {none, "backups"},
	"NotPossible":        {"remove the cause that the message names", "backups"},
	"Checking":           {none, "backups"},
	"Restoring":          {none, "backups"},
	"RestoringUnchecked": {none, "backups"},

	// etcd members
	"NotStarted":       {"read its log on the host: `capstan logs MACHINE etcd`", "etcd-has-no-quorum"},
	"Learner":          {none, "etcd-has-no-quorum"},
	"Alarm":            {"free space as docs/etcd.md describes", "etcd-has-no-quorum"},
	"NoLeader":         {"repair control plane machines until a majority runs", "etcd-has-no-quorum"},
	"NotProbed":        {none, "etcd-has-no-quorum"},
	"MovingLeadership": {none, "etcd-has-no-quorum"},

	// addresses
	"Exhausted":        {"add addresses to the pool, or delete claims", "addresses"},
	"OutOfRange":       {"add the addresses to the pool again, or delete their claims", "addresses"},
	"Overlapping":      {"separate the pools, or accept the overlap as docs/ipam.md describes", "addresses"},
	"OverlapRefused":   {"separate the pools", "addresses"},
	"ArrivingFromMove": {none, "addresses"},
	"Deleting":         {"look at the objects that the message names", "an-object-is-not-deleted"},
}

// adviceFor returns the remedy for a condition.
func adviceFor(kind, reason string) advice {
	switch kind {
	case "Paused":
		return advice{"set spec.paused of the Cluster to false, or remove the annotation cluster.x-k8s.io/paused", "a-paused-object"}
	case "Deleting":
		return advice{"look at the objects that the message names", "an-object-is-not-deleted"}
	case "ScalingUp", "ScalingDown", "RollingOut":
		return advice{"nothing while its machines start or leave; else look at their waits with `capstan describe`", "an-update-does-not-proceed"}
	}
	return adviceByReason[reason]
}
