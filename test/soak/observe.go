//go:build e2e

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/test/e2e/harness"
)

// stateTimeout bounds one request to capstan or capstand, which may be stopped.
const stateTimeout = 5 * time.Second

// capstandMachines requests the machines of capstand, and stores their ids.
func (s *soak) capstandMachines(ctx context.Context) ([]*hostpb.Machine, error) {
	conn, err := grpc.NewClient("unix://"+s.layout.HostSocket(host), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	answer, err := hostpb.NewHostClient(conn).ListMachines(ctx, &hostpb.ListMachinesRequest{})
	if err != nil {
		return nil, err
	}
	for _, m := range answer.Machines {
		s.seen(m.Spec.Id, m.Spec.Network.GetId(), m.Spec.Cluster)
	}
	return answer.Machines, nil
}

// holders returns the machines and claims that have an address now.
func (s *soak) holders(ctx context.Context) (out []holder, err error) {
	machines, err := s.capstandMachines(ctx)
	if err != nil {
		return nil, err
	}
	for _, m := range machines {
		for _, a := range m.Spec.Addresses {
			out = append(out, holder{m.Spec.Network.GetId(), a.Address, m.Spec.Name})
		}
	}
	list := &capiipamv1.IPAddressList{}
	if err := s.plane.Client.List(ctx, list, client.InNamespace(namespace)); err != nil {
		return nil, err
	}
	for _, a := range list.Items {
		out = append(out, holder{"the pool " + a.Spec.PoolRef.Name, a.Spec.Address, a.Name})
	}
	return out, nil
}

// look takes a snapshot of the management plane, the hosts and the clusters.
func (s *soak) look(ctx context.Context) (snapshot, error) {
	out := snapshot{Machines: map[string]string{}, Running: map[string]string{}, Networks: map[string]string{}, Members: map[string]membership{}}
	for _, look := range []func(context.Context, *snapshot) error{s.lookAtObjects, s.lookAtMachines, s.lookAtClaims, s.lookAtMembers, s.lookAtBox} {
		if err := look(ctx, &out); err != nil {
			return snapshot{}, err
		}
	}
	return out, nil
}

func (s *soak) lookAtObjects(ctx context.Context, out *snapshot) error {
	clusters, machines, networks, secrets := &clusterv1.ClusterList{}, &infrav1.CapstanMachineList{}, &infrav1.CapstanClusterList{}, &corev1.SecretList{}
	for _, list := range []client.ObjectList{clusters, machines, networks, secrets} {
		if err := s.plane.Client.List(ctx, list, client.InNamespace(namespace)); err != nil {
			return err
		}
	}
	for _, c := range s.schedule.clusters {
		out.Wanted = append(out.Wanted, c.Name)
		out.Size += c.ControlPlanes + c.Workers
	}
	for _, c := range clusters.Items {
		out.Clusters = append(out.Clusters, c.Name)
	}
	for _, m := range machines.Items {
		s.seen(m.Spec.ID, "", "")
		out.Machines[m.Spec.ID] = m.Name
	}
	for _, n := range networks.Items {
		s.seen("", n.Spec.ID, n.Name)
		out.Networks[n.Spec.ID] = n.Name
	}
	for _, x := range secrets.Items {
		out.Secrets = append(out.Secrets, secret{x.Name, x.Labels[clusterv1.ClusterNameLabel]})
	}
	return nil
}

func (s *soak) lookAtMachines(ctx context.Context, out *snapshot) error {
	machines, err := s.capstandMachines(ctx)
	if err != nil {
		return err
	}
	for _, m := range machines {
		out.Running[m.Spec.Id] = m.Spec.Name
	}
	out.Holders, err = s.holders(ctx)
	return err
}

func (s *soak) lookAtClaims(ctx context.Context, out *snapshot) error {
	for _, n := range s.schedule.claims {
		out.Claims.Wanted = append(out.Claims.Wanted, claimName(n))
	}
	list, addresses, pool := &capiipamv1.IPAddressClaimList{}, &capiipamv1.IPAddressList{}, &ipamv1.CapstanIPPool{}
	if err := s.plane.Client.List(ctx, list, client.InNamespace(namespace)); err != nil {
		return err
	}
	for _, c := range list.Items {
		out.Claims.Found = append(out.Claims.Found, c.Name)
	}
	if err := s.plane.Client.List(ctx, addresses, client.InNamespace(namespace)); err != nil {
		return err
	}
	out.Claims.Addresses = map[string]string{}
	for _, a := range addresses.Items {
		out.Claims.Addresses[a.Spec.ClaimRef.Name] = a.Spec.Address
	}
	if err := s.plane.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: poolName}, pool); err != nil {
		return err
	}
	if pool.Status.Addresses != nil {
		out.Claims.Used = int(pool.Status.Addresses.Used)
	}
	return nil
}

// lookAtMembers requests the members from etcd itself, with etcdctl in a control plane machine. It does not use the
// objects that report them.
func (s *soak) lookAtMembers(ctx context.Context, out *snapshot) error {
	machines, err := s.capstandMachines(ctx)
	if err != nil {
		return err
	}
	for _, m := range machines {
		if !m.Spec.ControlPlane {
			continue
		}
		members := out.Members[m.Spec.Cluster]
		members.Machines = append(members.Machines, m.Spec.Name)
		if members.Members == nil && m.Status.Pid > 0 {
			if members.Members, err = membersSeenBy(ctx, m); err != nil {
				return err
			}
		}
		out.Members[m.Spec.Cluster] = members
	}
	return nil
}

func membersSeenBy(ctx context.Context, m *hostpb.Machine) ([]string, error) {
	const pki = "/etc/kubernetes/pki/etcd/"
	out, err := harness.Command(ctx, nil, "nsenter", "-m", "-n", "-t", fmt.Sprint(m.Status.Pid), "--",
		"/opt/capstan/kubernetes/"+m.Spec.KubernetesVersion+"/etcdctl", "--endpoints", "https://127.0.0.1:2379", "--command-timeout", "5s",
		"--cacert", pki+"ca.crt", "--cert", pki+"healthcheck-client.crt", "--key", pki+"healthcheck-client.key", "member", "list", "-w", "json")
	if err != nil {
		return nil, err
	}
	var answer struct {
		Members []struct{ Name string }
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil {
		return nil, err
	}
	names := []string{}
	for _, member := range answer.Members {
		names = append(names, member.Name)
	}
	return names, nil
}

// lookAtBox lists the objects on this host that belong to current and former machines and networks of the plane.
func (s *soak) lookAtBox(_ context.Context, out *snapshot) (err error) {
	out.Traces, err = s.traces()
	return err
}

func (s *soak) traces() ([]trace, error) {
	var out []trace
	for _, look := range []func() ([]trace, error){s.folders, s.netns, s.links, s.tables, s.leases, s.cgroups, s.mounts, s.loops} {
		found, err := look()
		if err != nil {
			return nil, err
		}
		out = append(out, found...)
	}
	return out, nil
}

// folders lists the folders of capstand's state. The name of each folder contains the id of its object.
func (s *soak) folders() (out []trace, err error) {
	for _, kind := range []string{"machines", "run", "balancers", "networks", "runc"} {
		entries, err := os.ReadDir(filepath.Join(s.hostRoot(), kind))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, entry := range entries {
			out = append(out, trace{"folder", kind + "/" + entry.Name(), s.idIn(entry.Name())})
		}
	}
	// capstand keeps a deleted id for a day, so machines that existed only between two snapshots are found as well.
	entries, err := os.ReadDir(filepath.Join(s.hostRoot(), "tombstones"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, entry := range entries {
		if id, ofMachine := strings.CutPrefix(entry.Name(), "machine."); ofMachine {
			s.seen(id, "", "")
		}
	}
	return out, nil
}

func (s *soak) netns() (out []trace, err error) {
	for id := range s.seenMachines() {
		if path := s.box().NetNS(id); atomicfile.Exists(path) {
			out = append(out, trace{"network namespace", path, id})
		}
	}
	return out, nil
}

func (s *soak) links() (out []trace, err error) {
	owners := map[string]string{}
	for id := range s.seenMachines() {
		owners[network.VethName(id)] = id
	}
	for id := range s.seenNetworks() {
		owners[network.BridgeName(id)] = id
	}
	all, err := netlink.LinkList()
	for _, l := range all {
		if id, ok := owners[l.Attrs().Name]; ok {
			out = append(out, trace{"link", l.Attrs().Name, id})
		}
	}
	return out, err
}

func (s *soak) tables() (out []trace, err error) {
	listed, err := exec.Command("nft", "list", "tables").Output()
	if err != nil {
		return nil, err
	}
	for id := range s.seenNetworks() {
		if name := network.TableName(id); strings.Contains(string(listed), name) {
			out = append(out, trace{"nftables table", name, id})
		}
	}
	return out, nil
}

func (s *soak) leases() (out []trace, err error) {
	files, err := filepath.Glob(filepath.Join(network.DefaultRunDir, "networks", "*", "leases", "*"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		lease := network.Lease{}
		if err := atomicfile.ReadJSON(file, &lease); err == nil && lease.Root == s.hostRoot() {
			out = append(out, trace{"lease", filepath.Base(file), lease.Machine})
		}
	}
	return out, nil
}

func (s *soak) cgroups() (out []trace, err error) {
	id, err := os.ReadFile(filepath.Join(s.hostRoot(), "host-id"))
	if errors.Is(err, fs.ErrNotExist) {
		id, err = []byte(s.hostID), nil
	}
	if err != nil {
		return nil, err
	}
	s.hostID = strings.TrimSpace(string(id))
	found, err := filepath.Glob("/sys/fs/cgroup/*/capstan/" + s.hostID + "/*")
	if err != nil {
		return nil, err
	}
	for _, path := range found {
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			out = append(out, trace{"cgroup", path, s.idIn(filepath.Base(path))})
		}
	}
	return out, nil
}

// mounts lists the mounts below the state folders of this plane's machines.
func (s *soak) mounts() (out []trace, err error) {
	all, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(all)) {
		fields := strings.Fields(line)
		if len(fields) < 5 || !strings.HasPrefix(fields[4], s.hostRoot()+"/") {
			continue
		}
		out = append(out, trace{"mount", fields[4], s.idIn(fields[4])})
	}
	return out, nil
}

// loops lists the loop devices over files of this plane.
func (s *soak) loops() (out []trace, err error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		if backing, err := os.ReadFile(file); err == nil && strings.HasPrefix(string(backing), s.layout.Root+"/") {
			out = append(out, trace{"loop device", strings.TrimSpace(file + " over " + string(backing)), s.idIn(string(backing))})
		}
	}
	return out, nil
}

// settled returns nil when a cluster has its desired state: it is Available, it has the desired number of machines, none
// of them is outdated, and all of its Nodes are Ready.
func (s *soak) settled(ctx context.Context, c wantedCluster) error {
	cluster := &clusterv1.Cluster{}
	if err := s.plane.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: c.Name}, cluster); err != nil {
		return err
	}
	if !conditions.IsTrue(cluster, clusterv1.ClusterAvailableCondition) {
		return fmt.Errorf("cluster %s is not Available: %s", c.Name, messageOf(cluster, clusterv1.ClusterAvailableCondition))
	}
	for _, condition := range []string{clusterv1.ClusterRollingOutCondition, clusterv1.ClusterScalingUpCondition, clusterv1.ClusterScalingDownCondition} {
		if conditions.IsTrue(cluster, condition) {
			return fmt.Errorf("cluster %s is %s: %s", c.Name, condition, messageOf(cluster, condition))
		}
	}
	if cp := cluster.Status.ControlPlane; cp == nil || !all(c.ControlPlanes, cp.DesiredReplicas, cp.Replicas, cp.UpToDateReplicas, cp.AvailableReplicas) {
		return fmt.Errorf("cluster %s should have %d control plane machines, found %s", c.Name, c.ControlPlanes, printed(cp))
	}
	if w := cluster.Status.Workers; w == nil || !all(c.Workers, w.DesiredReplicas, w.Replicas, w.UpToDateReplicas, w.AvailableReplicas) {
		return fmt.Errorf("cluster %s should have %d workers, found %s", c.Name, c.Workers, printed(w))
	}
	machines := &clusterv1.MachineList{}
	if err := s.plane.Client.List(ctx, machines, client.InNamespace(namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: c.Name}); err != nil {
		return err
	}
	if n := c.ControlPlanes + c.Workers; len(machines.Items) != n {
		return fmt.Errorf("cluster %s should have %d Machines, found %d", c.Name, n, len(machines.Items))
	}
	for _, m := range machines.Items {
		if !m.DeletionTimestamp.IsZero() {
			return fmt.Errorf("the Machine %s is being deleted", m.Name)
		}
	}
	return s.nodesReady(ctx, c)
}

func all(n int, values ...*int32) bool {
	for _, v := range values {
		if int(ptr.Deref(v, -1)) != n {
			return false
		}
	}
	return true
}

func printed(status any) string {
	out, err := json.Marshal(status)
	if err != nil {
		return err.Error()
	}
	return string(out)
}

func messageOf(cluster *clusterv1.Cluster, condition string) string {
	c := apimeta.FindStatusCondition(cluster.Status.Conditions, condition)
	if c == nil {
		return "no condition"
	}
	return c.Reason + ": " + c.Message
}

func (s *soak) nodesReady(ctx context.Context, c wantedCluster) error {
	w, err := s.useCluster(ctx, c.Name)
	if err != nil {
		return err
	}
	nodes, err := w.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	ready := 0
	for _, node := range nodes.Items {
		for _, condition := range node.Status.Conditions {
			if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
				ready++
			}
		}
	}
	if n := c.ControlPlanes + c.Workers; ready != n || len(nodes.Items) != n {
		return fmt.Errorf("cluster %s should have %d Nodes Ready, found %d of %d", c.Name, n, ready, len(nodes.Items))
	}
	return nil
}
