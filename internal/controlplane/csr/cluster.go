package csr

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/secret"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// Cluster is the knowledge about the machines of a cluster that a decision needs.
type Cluster struct {
	Machines []clusterv1.Machine
	Pools    []clusterv1.MachinePool
	// Tokens are the ids of bootstrap tokens in bootstrap data, by the name of its Secret. Only those of requests are here.
	Tokens map[string][]string
}

// join decides whether the holder of a bootstrap token may become the node. A token belongs to the Machine, or to the
// machines of the pool, whose bootstrap data holds it. The machines of a pool share a token: with it, none of them gets
// the name of one that is a node already.
func (c Cluster) join(token, node string) Decision {
	if machine := c.machineFor(node, token); machine != nil {
		d := approve("node %s is Machine %s, whose bootstrap data has the token %s", node, machine.Name, token)
		if sharesToken(machine) {
			d.NewNode = node
		}
		return d
	}
	if pool := c.openPool(token); pool != nil && len(machinesOf(node, c.Machines)) == 0 {
		if ref := pool.Spec.Template.Spec.Bootstrap.ConfigRef; ref.APIGroup == bootstrapv1.GroupVersion.Group {
			return untouched("MachinePool %s has a %s and no Machine of the node %s, without which the node gets neither a serving certificate nor one of the node agent: use an infrastructure that creates Machines for pools", pool.Name, ref.Kind, node)
		}
		d := approve("the bootstrap data of MachinePool %s has the token %s, and node %s is new", pool.Name, token, node)
		d.NewNode = node
		return d
	}
	return untouched("%s", c.stranger(node, token))
}

// machineFor is the Machine whose node has the name. With a token, only a Machine whose bootstrap data holds it, and that is
// not being deleted.
func (c Cluster) machineFor(node, token string) *clusterv1.Machine {
	for _, m := range machinesOf(node, c.Machines) {
		if token == "" || m.DeletionTimestamp.IsZero() && c.holds(c.dataOf(m), token) {
			return m
		}
	}
	return nil
}

// sharesToken reports whether a Machine joins with the token of its pool: it has no bootstrap data of its own.
func sharesToken(m *clusterv1.Machine) bool {
	return ptr.Deref(m.Spec.Bootstrap.DataSecretName, "") == ""
}

// stranger returns the reason why no Machine may use the name with the token.
func (c Cluster) stranger(node, token string) string {
	machines := machinesOf(node, c.Machines)
	if len(machines) == 0 {
		return fmt.Sprintf("no Machine has the node %s yet", node)
	}
	return fmt.Sprintf("node %s is Machine %s, and its bootstrap data does not have the token %s", node, machines[0].Name, token)
}

// dataOf is the name of a Machine's bootstrap data. The Machines of a pool share that of the pool.
func (c Cluster) dataOf(m *clusterv1.Machine) string {
	if name := ptr.Deref(m.Spec.Bootstrap.DataSecretName, ""); name != "" {
		return name
	}
	for _, ref := range m.OwnerReferences {
		i := slices.IndexFunc(c.Pools, func(p clusterv1.MachinePool) bool { return ref.Kind == "MachinePool" && p.Name == ref.Name })
		if i >= 0 {
			return dataOfPool(&c.Pools[i])
		}
	}
	return ""
}

func dataOfPool(p *clusterv1.MachinePool) string {
	return ptr.Deref(p.Spec.Template.Spec.Bootstrap.DataSecretName, "")
}

// openPool returns the pool whose bootstrap data contains the token and whose infrastructure creates no Machines, so
// the names of its nodes are not known in advance. A CapstanMachinePool creates Machines.
func (c Cluster) openPool(token string) *clusterv1.MachinePool {
	for i := range c.Pools {
		p := &c.Pools[i]
		if p.Spec.Template.Spec.InfrastructureRef.Kind != infrav1.MachinePoolKind && !c.hasMachines(p) && c.holds(dataOfPool(p), token) {
			return p
		}
	}
	return nil
}

func (c Cluster) hasMachines(p *clusterv1.MachinePool) bool {
	return slices.ContainsFunc(c.Machines, func(m clusterv1.Machine) bool {
		return slices.ContainsFunc(m.OwnerReferences, func(ref metav1.OwnerReference) bool { return ref.Kind == "MachinePool" && ref.Name == p.Name })
	})
}

// hasToken reports whether bootstrap data of the cluster contains the token.
func (c Cluster) hasToken(token string) bool {
	for data := range c.Tokens {
		if c.holds(data, token) {
			return true
		}
	}
	return false
}

// holds reports whether the bootstrap data in a Secret contains a token of the id.
func (c Cluster) holds(data, id string) bool { return slices.Contains(c.Tokens[data], id) }

// tokensOf returns the ids of the tokens in bootstrap data, by the name of its Secret. It returns only ids with which requests were made. It
// reads each Secret once, because tenants choose the number and the size of the Secrets, and the number of requests.
func tokensOf(secrets []corev1.Secret, asked map[string]bool) map[string][]string {
	out := map[string][]string{}
	for i := range secrets {
		if s := &secrets[i]; s.Type == clusterv1.ClusterSecretType {
			out[s.Name] = tokenIDs(s, asked)
		}
	}
	return out
}

// askedTokens returns the ids of the tokens with which requests were made.
func askedTokens(requests []certificatesv1.CertificateSigningRequest) map[string]bool {
	out := map[string]bool{}
	for i := range requests {
		if id := bootstrapToken(&requests[i]); id != "" {
			out[id] = true
		}
	}
	return out
}

// bootstrapTokens finds bootstrap tokens; the first group is the id.
var bootstrapTokens = regexp.MustCompile(`\b([a-z0-9]{6})\.[a-z0-9]{16}\b`)

// tokenIDs returns the asked ids of the tokens in bootstrap data. Capstan's bootstrap provider records the ids in an annotation. The data of
// other providers and of older versions is searched.
func tokenIDs(s *corev1.Secret, asked map[string]bool) (ids []string) {
	if recorded, ok := s.Annotations[bootstrapv1.TokenIDsAnnotation]; ok {
		for id := range strings.SplitSeq(recorded, ",") {
			if asked[id] {
				ids = append(ids, id)
			}
		}
		return ids
	}
	for _, found := range bootstrapTokens.FindAllSubmatch(s.Data[secret.KubeconfigDataName], -1) {
		if id := string(found[1]); asked[id] {
			ids = append(ids, id)
		}
	}
	return ids
}

// machineOf is the Machine whose node has the name.
func machineOf(node string, machines []clusterv1.Machine) *clusterv1.Machine {
	if found := machinesOf(node, machines); len(found) > 0 {
		return found[0]
	}
	return nil
}

// machinesOf are the Machines whose node has the name: the one that Cluster API has linked to it. Before that, the
// node's name is that of the Machine, of its infrastructure machine, or the machine's host name.
func machinesOf(node string, machines []clusterv1.Machine) []*clusterv1.Machine {
	if node == "" {
		return nil
	}
	var found []*clusterv1.Machine
	for i := range machines {
		m := &machines[i]
		switch {
		case m.Status.NodeRef.Name == node:
			return []*clusterv1.Machine{m}
		case m.Status.NodeRef.IsDefined():
		case m.Name == node || m.Spec.InfrastructureRef.Name == node || hasAddress(m, node, isName):
			found = append(found, m)
		}
	}
	return found
}
