package infrastructure_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"go4.org/netipx"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
	"capstan.dev/capstan/internal/testenv/testmetrics"
)

// The status of a CapstanHost contains the report of capstand and follows its changes.
func TestHostStatus(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	host, fake := b.addHost(nil)
	b.Expect(host.Finalizers).To(ConsistOf(infrav1.HostFinalizer))
	b.Expect(host.Status.Capacity.Memory().String()).To(Equal("64Gi"))
	b.Expect(host.Status.Capacity.Cpu().String()).To(Equal("4"))
	b.Expect(host.Status.Versions).To(Equal([]string{"v1.35.0", "v1.36.3"}))
	b.Expect(host.Status.NodeInfo).To(Equal(infrav1.NodeInfo{Architecture: "amd64", OperatingSystem: "linux"}))
	fake.SetInfo(func(i *hostpb.HostInfo) {
		i.AllocatedMemoryBytes, i.Machines = 4<<30, 2
		i.DiskBytes, i.AllocatedDiskBytes, i.DiskBackend = 100<<30, 40<<30, "Image"
		i.LocalVolumeSizes = "NotEnforced"
	})
	b.Eventually(func() string {
		b.get(host)
		return host.Status.Allocatable.Memory().String()
	}).Should(Equal("60Gi"))
	b.Expect(host.Status.Capacity.StorageEphemeral().String()).To(Equal("100Gi"))
	b.Expect(host.Status.Allocatable.StorageEphemeral().String()).To(Equal("60Gi"))
	b.Expect(host.Status.DiskBackend).To(Equal(infrav1.DiskBackendImage))
	b.Expect(host.Status.LocalVolumeSizes).To(Equal(infrav1.LocalVolumeSizesNotEnforced))
	b.Expect(host.Status.Machines).To(HaveValue(Equal(int32(2))))
	b.unchanged(host)
	b.delete(host)
	b.gone(host)
}

// The deletion of a host waits for its machines and load balancers, unless the host is abandoned.
func TestHostInUse(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	b.delete(b.host)
	b.Expect(b.condition(b.host, "Deleting", metav1.ConditionTrue, "InUse")).To(Equal("The host has 1 CapstanMachines and the load balancers of 1 CapstanClusters: delete them first. If the host is permanently lost, annotate it with infrastructure.capstan.dev/abandoned"))
	b.condition(b.host, "Ready", metav1.ConditionFalse, "InUse")
	_, other := b.addMachine(nil, nil)
	b.Expect(b.condition(other, "HostAssigned", metav1.ConditionFalse, "NoHost")).To(ContainSubstring("is being deleted"))
	b.delete(other)
	b.gone(other)
	b.delete(m)
	b.gone(m)
	b.delete(b.capstan)
	b.gone(b.capstan)
	b.gone(b.host)

	b = newBox(t)
	b.waitProvisioned()
	b.delete(b.host)
	b.condition(b.host, "Deleting", metav1.ConditionTrue, "InUse")
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Annotations = map[string]string{infrav1.HostAbandonedAnnotation: ""} })
	b.gone(b.host)
}

// No new machine is placed on an unschedulable host, and its machines stay.
func TestUnschedulable(t *testing.T) {
	b := newBox(t).provisioned()
	_, stays := b.addMachine(nil, nil)
	b.running(stays)
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.Unschedulable = ptr.To(true) })
	_, waits := b.addMachine(nil, nil)
	b.Expect(b.condition(waits, "HostAssigned", metav1.ConditionFalse, "NoHost")).To(ContainSubstring("is unschedulable"))
	b.running(stays)
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.Unschedulable = nil })
	b.running(waits)
}

// ALL-11: the host owns its credentials, so that clusterctl moves them. A condition reports invalid ones.
func TestCredentials(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	name := unique("creds")
	host := b.hostAt("127.0.0.1:1", providerNamespace, name)
	b.Expect(b.condition(host, "Connected", metav1.ConditionFalse, "CredentialsInvalid")).To(ContainSubstring(name))
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: providerNamespace, Name: name}, Data: map[string][]byte{"tls.crt": []byte("x")}}
	b.create(secret)
	b.Eventually(func() string {
		return b.condition(host, "Connected", metav1.ConditionFalse, "CredentialsInvalid")
	}).Should(ContainSubstring("must have ca.crt, tls.crt and tls.key"))
	b.get(secret)
	b.Expect(secret.OwnerReferences).To(ConsistOf(HaveField("UID", host.UID)))
	b.delete(host)
	b.gone(host)
}

// MP-11, ALL-18: the provider changes Secrets only in its own namespace. If a host names a Secret of another namespace, a condition
// reports this, and the Secret stays unchanged.
func TestCredentialsElsewhere(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: "somebodys"}, Data: map[string][]byte{"tls.crt": []byte("x")}}
	b.create(secret)
	host := b.hostAt("127.0.0.1:1", b.namespace, "somebodys")
	b.Expect(b.condition(host, "Connected", metav1.ConditionFalse, "CredentialsInvalid")).To(ContainSubstring("the provider cannot patch the Secret with the host's credentials in namespace"))
	b.get(secret)
	b.Expect(secret.OwnerReferences).To(BeEmpty())
	b.Expect(secret.Labels).To(BeEmpty())
	b.delete(host)
	b.gone(host)
}

// A host over TCP: the condition contains the cause of each failed connection, and corrected credentials are used at once.
// Row ALL-18.
func TestHostOverTLS(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	dir := t.TempDir()
	issue := func(dir string, validity time.Duration, at time.Time) map[string][]byte {
		c, err := credentials.Make(dir, []string{"127.0.0.1"}, validity, at)
		b.Expect(err).NotTo(HaveOccurred())
		return c.Data()
	}
	good := issue(dir, time.Hour, time.Now())
	name := unique("creds")
	address := fakehost.New(t).ServeTLS(t, credentials.In(dir))
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: providerNamespace, Name: name}, Data: good}
	b.create(secret)
	host := b.hostAt(address, providerNamespace, name)
	b.condition(host, "Connected", metav1.ConditionTrue, "Connected")

	use := func(data map[string][]byte) {
		update(b, secret, func(s *corev1.Secret) { s.Data = data })
	}
	stranger := issue(t.TempDir(), time.Hour, time.Now())
	stranger["ca.crt"] = good["ca.crt"]
	use(stranger)
	b.Eventually(func() string {
		return b.condition(host, "Connected", metav1.ConditionFalse, "Unreachable")
	}).Should(ContainSubstring("unknown certificate authority"))

	use(issue(t.TempDir(), time.Hour, time.Now()))
	b.Eventually(func() string {
		return b.condition(host, "Connected", metav1.ConditionFalse, "Unreachable")
	}).Should(ContainSubstring("signed by unknown authority"))

	expired := issue(t.TempDir(), time.Minute, time.Now().Add(-time.Hour))
	use(expired)
	b.Eventually(func() string {
		return b.condition(host, "Connected", metav1.ConditionFalse, "CredentialsInvalid")
	}).Should(ContainSubstring("tls.crt has expired on"))

	use(good)
	b.condition(host, "Connected", metav1.ConditionTrue, "Connected")
	b.delete(host)
	b.gone(host)
}

// ALL-08
func TestPausedHost_ALL08(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	host, _ := b.addHost(nil)
	update(b, host, func(h *infrav1.CapstanHost) { h.Annotations = map[string]string{clusterv1.PausedAnnotation: ""} })
	b.condition(host, "Paused", metav1.ConditionTrue, "Paused")
	b.deletePaused(host)
	b.Consistently(func() []string { b.get(host); return host.Finalizers }).ShouldNot(BeEmpty())
	update(b, host, func(h *infrav1.CapstanHost) { h.Annotations = nil })
	b.gone(host)
}

// The certificates of a host over TCP: the manager's certificate is renewed over the connection that it protects, and the host
// renews its own. A condition names certificates that are older than two thirds of their life. The metric contains the expiry
// of each certificate.
func TestHostCertificatesAreRenewed(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	dir := t.TempDir()
	due, err := credentials.Make(dir, []string{"127.0.0.1"}, time.Hour, time.Now().Add(-50*time.Minute))
	b.Expect(err).NotTo(HaveOccurred())
	files := credentials.In(dir)
	fake := fakehost.New(t)
	name := unique("due")
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: providerNamespace, Name: name}, Data: due.Data()}
	b.create(secret)
	host := b.hostAt(fake.ServeTLS(t, files), providerNamespace, name)
	var renewed credentials.Client
	b.Eventually(func() time.Duration {
		b.get(secret)
		renewed, err = credentials.FromSecret(secret.Data)
		b.Expect(err).NotTo(HaveOccurred())
		return time.Until(renewed.Certificate().NotAfter)
	}).Should(BeNumerically(">", 55*time.Minute))
	b.Expect(renewed.CA).To(Equal(due.CA))
	b.Expect(renewed.Key).NotTo(Equal(due.Key))
	b.condition(host, "Connected", metav1.ConditionTrue, "Connected")
	expiring := func() string {
		return b.condition(host, infrav1.CertificatesExpiringCondition, metav1.ConditionTrue, infrav1.CertificatesExpiringReason)
	}
	b.Eventually(expiring).Should(And(HavePrefix("server expires on"), Not(ContainSubstring("client"))))

	_, err = files.Renew(time.Now()) // as capstand does
	b.Expect(err).NotTo(HaveOccurred())
	fake.SetInfo(func(i *hostpb.HostInfo) { i.Machines = 1 })
	b.condition(host, infrav1.CertificatesExpiringCondition, metav1.ConditionFalse, infrav1.CertificatesNotExpiringReason)
	b.Expect(expirations(b, host.Name)).To(And(HaveLen(3), HaveKeyWithValue("client", float64(renewed.Certificate().NotAfter.Unix()))))

	b.Expect(os.Remove(filepath.Join(dir, "ca.key"))).To(Succeed())
	update(b, secret, func(s *corev1.Secret) { s.Data = due.Data() })
	b.Eventually(expiring).Should(And(HavePrefix("client expires on"), ContainSubstring("make new credentials")))
	b.delete(host)
	b.gone(host)
	b.Eventually(func() map[string]float64 { return expirations(b, host.Name) }).Should(BeEmpty())
}

// The managers of a host that joined have its authority: they replace their certificate also after its expiry, and the host accepts it.
func TestExpiredCertificateOfManagersIsReplaced(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	m, err := credentials.NewAuthority(time.Hour, time.Now().Add(-2*time.Hour))
	b.Expect(err).NotTo(HaveOccurred())
	dir := t.TempDir()
	files := credentials.In(dir)
	key, err := certfiles.EnsureKey(files.Key)
	b.Expect(err).NotTo(HaveOccurred())
	made, err := m.Authority.Sign(pki.Leaf{CommonName: "capstand", Usages: pki.Server}.For("127.0.0.1"), key.Public(), time.Hour, time.Now())
	b.Expect(err).NotTo(HaveOccurred())
	b.Expect(errors.Join(certfiles.WriteFile(files.Cert, pki.EncodeCert(made)), certfiles.WriteFile(files.ClientCA, m.CA))).To(Succeed())
	name := unique("expired")
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: providerNamespace, Name: name}, Data: m.Data()}
	b.create(secret)
	host := b.hostAt(fakehost.New(t).ServeTLS(t, files), providerNamespace, name)
	b.condition(host, "Connected", metav1.ConditionTrue, "Connected")
	b.get(secret)
	next, err := credentials.AuthorityFromSecret(secret.Data)
	b.Expect(err).NotTo(HaveOccurred())
	b.Expect(next.Usable(time.Now())).To(BeTrue())
	b.Expect(next.CA).To(Equal(m.CA))
	b.delete(host)
	b.gone(host)
}

// expirations returns the metric of a host by certificate.
func expirations(b *box, host string) map[string]float64 {
	out := map[string]float64{}
	for _, s := range testmetrics.Gather(b.t, "capstan_certificate_expiration_timestamp_seconds", map[string]string{"name": host}) {
		out[s.Labels["certificate"]] = s.Value
	}
	return out
}

// The status of a host lists machines without a CapstanMachine, if their cluster exists here or existed here before a restore.
// Their addresses and networks stay reserved. A machine is removed only if the annotation names it. Machines of another
// management cluster and machines with an object are never removed.
func TestUnknownMachines(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	system := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem}}
	b.get(system)
	address := netip.MustParseAddr(m.Spec.Network.Addresses[0].Address)
	ensure := func(id string, network *hostpb.Network, address netip.Addr, managementCluster string) {
		_, err := b.fake.EnsureMachine(ctx, &hostpb.EnsureMachineRequest{ManagementCluster: managementCluster, Spec: &hostpb.MachineSpec{
			Id: id, Namespace: m.Namespace, Name: id, Cluster: network.GetName(), Network: network, MemoryBytes: 1 << 30,
			Image: "host", KubernetesVersion: "v1.36.3",
			Addresses: []*hostpb.Address{{Address: address.String(), Prefix: int32(netip.MustParsePrefix(network.Cidr).Bits())}},
		}})
		b.Expect(err).NotTo(HaveOccurred())
	}
	ids := func() (ids []string) {
		b.get(b.host)
		for _, u := range b.host.Status.UnknownMachines {
			ids = append(ids, u.ID)
		}
		return ids
	}
	made, _ := b.fake.Machine(m.Spec.ID)
	b.Expect(made.GetStatus().GetManagementCluster()).To(Equal(string(system.UID)))
	second := netip.MustParsePrefix(b.capstan.Spec.Network.MachineCIDR)
	second = netip.PrefixFrom(netipx.PrefixLastIP(second).Next(), second.Bits())
	lost := &hostpb.Network{Id: "lost-cluster", Namespace: m.Namespace, Name: "lost", Cidr: second.String()}
	ensure("lost-1", lost, second.Addr().Next().Next(), string(system.UID))
	ensure("unknown-1", made.GetSpec().GetNetwork(), address.Next(), "")
	ensure("unknown-2", made.GetSpec().GetNetwork(), address.Next().Next(), "")
	foreign := netip.MustParseAddr("10.9.0.2")
	ensure("foreign", &hostpb.Network{Id: "another-plane", Namespace: "x", Name: "y", Cidr: "10.9.0.0/24"}, foreign, "another")
	ensure("old", &hostpb.Network{Id: "older-plane", Namespace: "x", Name: "z", Cidr: "10.10.0.0/24"}, netip.MustParseAddr("10.10.0.2"), "")
	_, err := b.fake.EnsureLoadBalancer(ctx, &hostpb.LoadBalancer{Id: lost.Id, NetworkId: lost.Id, Namespace: lost.Namespace, Name: lost.Name, Listen: []string{":6443"}})
	b.Expect(err).NotTo(HaveOccurred())
	b.Eventually(ids).Should(Equal([]string{"lost-1", "unknown-1", "unknown-2"}))
	b.Expect(b.host.Status.UnknownMachines[0].Cluster).To(Equal("lost"))
	u := b.host.Status.UnknownMachines[1]
	b.Expect(u.Addresses).To(Equal([]string{address.Next().String()}))
	b.Expect(u.Namespace + "/" + u.Name + " of " + u.Cluster).To(Equal(m.Namespace + "/unknown-1 of " + b.cluster.Name))

	cluster, capstan := b.cluster, b.capstan
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Spec.Network.MachineCIDR = lost.Cidr })
	b.Expect(b.condition(b.capstan, infrav1.NetworkReadyCondition, metav1.ConditionFalse, infrav1.NetworkRefusedReason)).To(ContainSubstring("overlaps " + lost.Cidr))
	b.cluster, b.capstan = cluster, capstan
	_, next := b.addMachine(nil, nil)
	b.running(next)
	b.Expect(next.Spec.Network.Addresses[0].Address).To(Equal(address.Next().Next().Next().String()))

	prune := func(ids string) {
		update(b, b.host, func(h *infrav1.CapstanHost) {
			h.Annotations = map[string]string{infrav1.HostPruneAnnotation: ids}
		})
		b.Eventually(func() map[string]string { b.get(b.host); return b.host.Annotations }).ShouldNot(HaveKey(infrav1.HostPruneAnnotation))
	}
	prune("foreign," + m.Spec.ID)
	b.Expect(b.fake.Calls("DeleteMachine")).To(Equal(0))
	prune("unknown-2,foreign")
	b.Eventually(ids).Should(Equal([]string{"lost-1", "unknown-1"}))
	b.Expect(b.fake.LoadBalancer(lost.Id)).NotTo(BeNil())
	// The manager is killed after it has removed the machine. The next one continues with the record of the first one.
	recorded := make(chan string, 1)
	b.fake.Before("DeleteMachine", func() {
		stored := &infrav1.CapstanHost{}
		_ = env.Client.Get(ctx, client.ObjectKeyFromObject(b.host), stored)
		recorded <- stored.Annotations[infrav1.HostPruneNetworksAnnotation]
	})
	b.fake.Refuse("DeleteLoadBalancer", status.Error(codes.Unavailable, "the manager is gone"))
	update(b, b.host, func(h *infrav1.CapstanHost) {
		h.Annotations = map[string]string{infrav1.HostPruneAnnotation: "lost-1"}
	})
	b.Eventually(ids).Should(Equal([]string{"unknown-1"}))
	b.Expect(recorded).To(Receive(Equal(m.Namespace + "/lost/lost-cluster")))
	b.fake.Before("DeleteMachine", nil)
	b.Expect(b.fake.Network(lost.Id)).NotTo(BeNil())
	b.fake.Refuse("DeleteLoadBalancer", nil)
	b.Eventually(func() map[string]string { b.get(b.host); return b.host.Annotations }).Should(BeEmpty())
	b.Expect(b.fake.LoadBalancer(lost.Id)).To(BeNil())
	b.Expect(b.fake.Network(lost.Id)).To(BeNil())
	b.Expect(b.fake.LoadBalancer(b.capstan.Spec.ID)).NotTo(BeNil())
	for id, there := range map[string]bool{"lost-1": false, "unknown-1": true, "unknown-2": false, "foreign": true, "old": true, m.Spec.ID: true, next.Spec.ID: true} {
		if got, _ := b.fake.Machine(id); (got != nil) != there {
			t.Errorf("machine %s: %v", id, got)
		}
	}
}

// After a crash, only the annotation of a removal remains, because the machine is already removed. A network with a cluster
// stays. A network also stays if the administrator has withdrawn the request.
func TestPruneContinues(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	lost := &hostpb.Network{Id: "lost-cluster", Namespace: b.namespace, Name: "lost", Cidr: "10.9.0.0/24"}
	_, err := b.fake.EnsureNetwork(ctx, lost)
	b.Expect(err).NotTo(HaveOccurred())
	_, err = b.fake.EnsureLoadBalancer(ctx, &hostpb.LoadBalancer{Id: lost.Id, NetworkId: lost.Id, Namespace: lost.Namespace, Name: lost.Name, Listen: []string{":7443"}})
	b.Expect(err).NotTo(HaveOccurred())
	networks := fmt.Sprintf("%s/%s/%s,/../%s,%s/lost/lost-cluster", b.namespace, b.cluster.Name, b.capstan.Spec.ID, b.capstan.Spec.ID, b.namespace)
	annotations := func() map[string]string { b.get(b.host); return b.host.Annotations }
	annotate := func(to map[string]string) {
		update(b, b.host, func(h *infrav1.CapstanHost) { h.Annotations = to })
		b.Eventually(annotations).Should(BeEmpty())
	}

	annotate(map[string]string{infrav1.HostPruneNetworksAnnotation: networks})
	b.Expect(b.fake.Network(lost.Id)).NotTo(BeNil())

	annotate(map[string]string{infrav1.HostPruneAnnotation: "lost-1", infrav1.HostPruneNetworksAnnotation: networks})
	b.Expect(b.fake.Network(lost.Id)).To(BeNil())
	b.Expect(b.fake.Calls("DeleteLoadBalancer")).To(Equal(1))
	b.Expect(b.fake.Calls("DeleteNetwork")).To(Equal(1))
	b.Expect(b.fake.LoadBalancer(b.capstan.Spec.ID)).NotTo(BeNil())
}

// The target of a move records on the host that it owns the machines. Otherwise the source would list them as unknown.
func TestMovedMachineIsClaimed(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	made, _ := b.fake.Machine(m.Spec.ID)
	b.fake.Update(m.Spec.ID, func(s *hostpb.MachineStatus) { s.ManagementCluster = "source" })
	b.Eventually(func() string {
		now, _ := b.fake.Machine(m.Spec.ID)
		return now.GetStatus().GetManagementCluster()
	}).Should(Equal(made.GetStatus().GetManagementCluster()))
	b.Expect(made.GetStatus().GetManagementCluster()).NotTo(BeEmpty())
}
