package controlplane

import (
	"cmp"
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/reconciling"
)

const (
	// rotationRetry is the interval of checks of a waiting rotation, because changes of Nodes and ConfigMaps of the
	// workload cluster are no events here.
	rotationRetry = 2 * time.Second
	// passTime limits a pass over Nodes, because a cluster can have more Nodes than its API server and the rate limit of the client
	// allow. The rest of workloadTimeout is for the last request.
	passTime = workloadTimeout - 2*time.Second
)

// caName returns the name of the Secret of the cluster's certificate authority.
func caName(s *scope) string { return secret.Name(s.Cluster.Name, secret.ClusterCA) }

// rotations is the step that rotates the certificate authority of a cluster.
type rotations struct {
	*clients
	*secrets
	*annotator
	*recorder
}

// reconcile brings the whole cluster to the certificate authorities of the Secret, and then does the next step.
func (r *rotations) reconcile(ctx context.Context, s *scope) (result, error) {
	var again time.Duration
	if !s.Initialized() || s.Authority == nil {
		return result{}, nil
	}
	state := s.Rotation()
	if state.Underway() && !state.Settled() {
		state.Pending = r.lacking(ctx, s, state)
		again = rotationRetry
	}
	step := state.Step(s.Now)
	if step != model.RotationIdle {
		ctrl.LoggerFrom(ctx).Info("Rotating the certificate authority", "step", step, "Secret", klog.KObj(s.Authority))
	}
	if err := r.rotate(ctx, s, state, step); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "The next step of the certificate authority's rotation failed", "step", step)
		state.Pending = append(state.Pending, err.Error()) // The rest of the control plane does not wait for it.
	}
	state = s.Rotation().WithPending(state.Pending)
	r.setRotating(s, state)
	if step != model.RotationIdle {
		again = rotationRetry
	} else if wait := state.After.Sub(s.Now); again == 0 && wait > 0 {
		again = wait
	}
	return requeueAfter(again), nil
}

// setRotating sets the condition CertificateAuthorityRotating, and records an event for each phase.
func (r *rotations) setRotating(s *scope, state model.Rotation) {
	kind := controlplanev1.CertificateAuthorityRotatingCondition
	rotating, reason, message := state.Describe(s.Now)
	known, before := conditions.Has(s.Object, kind), conditions.GetReason(s.Object, kind)
	if !known && !rotating && state.After.IsZero() {
		return
	}
	status := metav1.ConditionFalse
	if rotating {
		status = metav1.ConditionTrue
	}
	reconciling.SetCondition(s.Object, kind, status, reason, "%s", message)
	if before != reason && (known || rotating) {
		about, _, _ := strings.Cut(message, "\n")
		r.event(s, corev1.EventTypeNormal, reason, "RotateCA", "%s", cmp.Or(about, "No rotation is in progress: one certificate authority signs all certificates"))
	}
}

// rotate does one step. Each step is one write, so that it is either done or not done.
func (r *rotations) rotate(ctx context.Context, s *scope, state model.Rotation, step model.RotationStep) error {
	switch step {
	case model.RotationRecord:
		if len(state.Established) > 1 && len(state.Target) == 1 {
			if finished, err := finishRotation(ctx, s); err != nil || !finished {
				return err
			}
		}
		return r.recordAuthorities(ctx, s, strings.Join(state.Target, ","))
	case model.RotationTrustNew:
		return r.writeAuthority(ctx, s, func(data map[string][]byte) error { return beginRotation(data, s.Object.Spec, s.Now) })
	case model.RotationSignNew:
		return r.writeAuthority(ctx, s, signWithNext)
	case model.RotationDropOld:
		return r.writeAuthority(ctx, s, dropOld)
	}
	return nil
}

// recordAuthorities records the authorities that the whole cluster trusts, if the control plane has not changed since it was read: a manager
// that has lost its leadership could otherwise bring back the record of a former step, which no later step corrects.
func (r *rotations) recordAuthorities(ctx context.Context, s *scope, fingerprints string) error {
	after := s.Object.DeepCopy()
	metav1.SetMetaDataAnnotation(&after.ObjectMeta, controlplanev1.AuthoritiesAnnotation, fingerprints)
	err := r.Client.Patch(ctx, after, client.MergeFromWithOptions(s.Object, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) {
		return nil // The cache was behind: the next pass follows.
	}
	if err == nil {
		s.Object.Annotations = after.Annotations // The status of the answer is older than that of this reconciliation.
	}
	return client.IgnoreNotFound(err)
}

// writeAuthority changes the Secret, if it has not changed since it was read.
func (r *rotations) writeAuthority(ctx context.Context, s *scope, change func(data map[string][]byte) error) error {
	after := s.Authority.DeepCopy()
	if err := change(after.Data); err != nil {
		return err
	}
	err := r.Client.Patch(ctx, after, client.MergeFromWithOptions(s.Authority, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) {
		return nil // The cache was behind: an event follows.
	}
	if err == nil {
		s.Authority = after
	}
	return err
}

// newAuthority creates the certificate authority of a cluster. Unlike that of Cluster API, it may sign its successor.
func newAuthority(spec controlplanev1.CapstanControlPlaneSpec, now time.Time) (*certs.KeyPair, error) {
	signer, err := algorithm(spec).NewKey()
	if err != nil {
		return nil, err
	}
	validity := cmp.Or(model.Day*time.Duration(spec.Config.Cluster.CACertificateValidityDays), pki.AuthorityValidity)
	made, err := pki.NewAuthorityFor("kubernetes", signer, validity, now)
	if err != nil {
		return nil, err
	}
	key, err := pki.EncodeKey(signer)
	return &certs.KeyPair{Cert: pki.EncodeCert(made.Cert), Key: key}, err
}

// algorithm returns that of new private keys.
func algorithm(spec controlplanev1.CapstanControlPlaneSpec) pki.Algorithm {
	return pki.Algorithm(spec.Config.Cluster.EncryptionAlgorithm)
}

// beginRotation creates a new authority. Machines trust it from now on; it does not sign yet.
func beginRotation(data map[string][]byte, spec controlplanev1.CapstanControlPlaneSpec, now time.Time) error {
	next, err := newAuthority(spec, now)
	if err != nil {
		return err
	}
	data[model.NextCertName], data[model.NextKeyName] = next.Cert, next.Key
	data[secret.TLSCrtDataName] = joinPEM(data[secret.TLSCrtDataName], next.Cert)
	return nil
}

// signWithNext makes the new authority the signer. The old authority cross-signs the new one, so that clients that trust only
// the old one can still verify servers.
func signWithNext(data map[string][]byte) error {
	old, err := certs.DecodeCertPEM(data[secret.TLSCrtDataName])
	if err != nil {
		return err
	}
	delete(data, bootstrap.CrossCADataName)
	if mayHaveAuthorities(old) {
		cross, err := crossSign(data[model.NextCertName], data[secret.TLSCrtDataName], data[secret.TLSKeyDataName])
		if err != nil {
			return err
		}
		data[bootstrap.CrossCADataName] = cross
	}
	data[secret.TLSCrtDataName] = joinPEM(data[model.NextCertName], certs.EncodeCertPEM(old))
	data[secret.TLSKeyDataName] = data[model.NextKeyName]
	delete(data, model.NextCertName)
	delete(data, model.NextKeyName)
	return nil
}

// mayHaveAuthorities reports whether an authority may sign another one.
func mayHaveAuthorities(ca *x509.Certificate) bool { return ca.MaxPathLen != 0 || !ca.MaxPathLenZero }

func crossSign(next, old, oldKey []byte) ([]byte, error) {
	authority, err := pki.ParseAuthority(old, oldKey)
	if err != nil {
		return nil, err
	}
	other, err := pki.ParseCert(next)
	if err != nil {
		return nil, err
	}
	cross, err := authority.SignAuthority(other)
	if err != nil {
		return nil, err
	}
	return pki.EncodeCert(cross), nil
}

// dropOld removes every authority except the signer.
func dropOld(data map[string][]byte) error {
	signer, err := certs.DecodeCertPEM(data[secret.TLSCrtDataName])
	if err != nil {
		return err
	}
	data[secret.TLSCrtDataName] = certs.EncodeCertPEM(signer)
	return nil
}

func joinPEM(first, second []byte) []byte {
	return []byte(strings.TrimSpace(string(first)) + "\n" + strings.TrimSpace(string(second)) + "\n")
}

// lacking describes the machines that do not have the target yet. It sends the target to the Nodes once the control
// plane machines have it. A machine whose state is unknown counts as one without it.
func (r *rotations) lacking(ctx context.Context, s *scope, state model.Rotation) []string {
	out, err := r.lackingControlPlane(ctx, s, state)
	if err != nil {
		return []string{err.Error()}
	}
	if len(out) > 0 {
		return out
	}
	if s.client == nil || s.Workload.Err != nil {
		return []string{"cannot read the Nodes of the workload cluster: " + fmt.Sprint(cmp.Or(s.Workload.Err, errors.New("there is no connection to it")))}
	}
	if out, err = r.lackingNodes(ctx, s, state); err != nil {
		return []string{"cannot read the Nodes of the workload cluster: " + err.Error()}
	}
	return out
}

func (r *rotations) lackingControlPlane(ctx context.Context, s *scope, state model.Rotation) ([]string, error) {
	known := s.Fleet() // The rotation does not wait for a Machine that is stuck on a dead host.
	machines := slices.DeleteFunc(s.Machines.UnsortedList(), func(m *clusterv1.Machine) bool { return known.Find(m.Name) == nil })
	holders, err := r.holders(ctx, machines)
	if err != nil {
		return nil, err
	}
	out := model.PendingMachines(state.Target, holders, "control plane Machine %s is to be replaced")
	if current := len(machines); len(out) == 0 && current != s.Target().Replicas {
		out = append(out, fmt.Sprintf("the control plane has %d Machines of %d", current, s.Target().Replicas))
	}
	return out, nil
}

// holders returns Machines and the authorities in their bootstrap data, sorted by name.
func (r *rotations) holders(ctx context.Context, machines []*clusterv1.Machine) ([]model.TrustHolder, error) {
	var out []model.TrustHolder
	for _, m := range machines {
		data, err := r.dataOf(ctx, m)
		if err != nil {
			return nil, err
		}
		out = append(out, model.TrustHolder{Name: m.Name, Trusted: model.SplitFingerprints(data.annotations[bootstrapv1.AuthoritiesAnnotation])})
	}
	slices.SortFunc(out, func(a, b model.TrustHolder) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// lackingNodes sends the target to the Nodes once kube-root-ca.crt, which pods use, has it, and reads the reports of the
// Nodes.
func (r *rotations) lackingNodes(ctx context.Context, s *scope, state model.Rotation) ([]string, error) {
	reading, cancel := context.WithTimeout(ctx, workloadTimeout)
	defer cancel()
	published := &corev1.ConfigMap{}
	if err := s.client.Get(reading, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: "kube-root-ca.crt"}, published); err != nil {
		return nil, err
	}
	if has, _ := nodeconfig.Fingerprints([]byte(published.Data["ca.crt"])); !slices.Equal(has, state.Target) {
		return []string{"the controller manager has not published the certificate authorities for pods yet"}, nil
	}
	machines := &clusterv1.MachineList{}
	if err := r.Client.List(reading, machines, reconciling.OfCluster(client.ObjectKeyFromObject(s.Cluster))); err != nil {
		return nil, err
	}
	out, err := r.lackingOnTheWay(reading, s, state, machines)
	if err != nil {
		return nil, err
	}
	nodes := &corev1.NodeList{}
	if err := s.client.List(reading, nodes); err != nil {
		return nil, err
	}
	holders, reached, err := r.announceToNodes(ctx, s, state.Target, nodes.Items, machines)
	if err != nil {
		return nil, err
	}
	if reached < len(nodes.Items) {
		out = append(out, fmt.Sprintf("%d of %d Nodes were reached in one pass, and the others follow", reached, len(nodes.Items)))
	}
	return append(out, model.PendingNodes(state.Target, holders)...), nil
}

// lackingOnTheWay describes the workers without a Node, and the next workers of pools, that may not have the target.
func (r *rotations) lackingOnTheWay(ctx context.Context, s *scope, state model.Rotation, machines *clusterv1.MachineList) ([]string, error) {
	own, pooled := workersOnTheWay(machines)
	holders, err := r.holders(ctx, own)
	if err != nil {
		return nil, err
	}
	out := model.PendingMachines(state.Target, holders, "Machine %s has no Node yet, and was made with other certificate authorities: when it has joined it follows; if it never does, delete it")
	for _, m := range pooled {
		out = append(out, fmt.Sprintf("Machine %s of a pool has started and has no Node yet, and can have other certificate authorities: when it has joined it follows; if it never does, delete it", m.Name))
	}
	pools, err := r.poolHolders(ctx, s)
	return append(out, model.PendingMachines(state.Target, pools, "the bootstrap data of MachinePool %s has other certificate authorities: its CapstanConfig reports why they are not replaced, or is paused")...), err
}

// poolHolders returns the MachinePools with a CapstanConfig, and the authorities in their bootstrap data. Deleted data makes no machine:
// it is created again with the target.
func (r *rotations) poolHolders(ctx context.Context, s *scope) ([]model.TrustHolder, error) {
	pools := &clusterv1.MachinePoolList{}
	if err := r.Client.List(ctx, pools, reconciling.OfCluster(client.ObjectKeyFromObject(s.Cluster))); err != nil {
		return nil, err
	}
	var out []model.TrustHolder
	for i := range pools.Items {
		from := pools.Items[i].Spec.Template.Spec.Bootstrap
		name := ptr.Deref(from.DataSecretName, "")
		if name == "" || from.ConfigRef.APIGroup != bootstrapv1.GroupVersion.Group || !pools.Items[i].DeletionTimestamp.IsZero() {
			continue
		}
		data, err := r.getSecret(ctx, client.ObjectKey{Namespace: s.Cluster.Namespace, Name: name})
		if err != nil {
			return nil, err
		}
		if data != nil {
			out = append(out, model.TrustHolder{Name: pools.Items[i].Name, Trusted: model.SplitFingerprints(data.Annotations[bootstrapv1.AuthoritiesAnnotation])})
		}
	}
	return out, nil
}

// announceToNodes sends the target to the Nodes until the pass is over, and returns those that it reached. The next pass reaches others: a
// Node that has the target needs no request, and neither does one whose machine has confirmed it, from which finishRotation has removed it.
func (r *rotations) announceToNodes(ctx context.Context, s *scope, target []string, nodes []corev1.Node, machines *clusterv1.MachineList) (holders []model.TrustHolder, reached int, err error) {
	known := map[string]bool{}
	for i := range machines.Items {
		known[machines.Items[i].Name] = true
	}
	signer := sync.OnceValues(func() (tls.Certificate, error) {
		return pki.KeyPair(s.Authority.Data[secret.TLSCrtDataName], s.Authority.Data[secret.TLSKeyDataName])
	})
	reached, err = onePass(ctx, nodes, func(ctx context.Context, n *corev1.Node) error {
		if gone, err := r.removeOrphan(ctx, s, n, known); err != nil || gone {
			return err
		}
		h := model.TrustHolder{
			Name: n.Name, Trusted: model.SplitFingerprints(n.Annotations[nodeconfig.TrustedAuthoritiesAnnotation]), Signer: n.Annotations[nodeconfig.KubeletAuthorityAnnotation],
		}
		holders = append(holders, h)
		if _, announced := n.Annotations[nodeconfig.AuthoritiesAnnotation]; !announced && len(model.PendingNodes(target, []model.TrustHolder{h})) == 0 {
			return nil
		}
		return r.announceTarget(ctx, s, n, signer)
	})
	return holders, reached, err
}

// onePass does something with Nodes for passTime, and returns their number. The time of the reads before does not count: they would leave
// none in a large cluster.
func onePass(ctx context.Context, nodes []corev1.Node, do func(context.Context, *corev1.Node) error) (reached int, err error) {
	end := time.Now().Add(passTime)
	ctx, cancel := context.WithTimeout(ctx, workloadTimeout)
	defer cancel()
	for ; reached < len(nodes) && ctx.Err() == nil && time.Now().Before(end); reached++ {
		if err := do(ctx, &nodes[reached]); err != nil {
			return reached, err
		}
	}
	return reached, nil
}

// removeOrphan deletes a Node without a Machine. Cluster API tries the same for ten seconds only, and its connection
// may be refused in that time, because it uses a certificate of the old authority. known are the Machines in the cache, which can be behind:
// a missing one is read live.
func (r *rotations) removeOrphan(ctx context.Context, s *scope, n *corev1.Node, known map[string]bool) (gone bool, err error) {
	name := n.Annotations[clusterv1.MachineAnnotation]
	if name == "" || known[name] || n.Annotations[clusterv1.ClusterNameAnnotation] != s.Cluster.Name || n.Annotations[clusterv1.ClusterNamespaceAnnotation] != s.Cluster.Namespace {
		return false, nil
	}
	err = r.LiveClient.Get(ctx, client.ObjectKey{Namespace: s.Cluster.Namespace, Name: name}, &clusterv1.Machine{})
	if !apierrors.IsNotFound(err) {
		return false, err
	}
	return true, client.IgnoreNotFound(s.client.Delete(ctx, n, client.Preconditions{UID: &n.UID}))
}

// announceTarget writes the target on a Node, and signs it for a machine that has published a challenge.
func (r *rotations) announceTarget(ctx context.Context, s *scope, n *corev1.Node, signer func() (tls.Certificate, error)) error {
	bundle := s.Authority.Data[secret.TLSCrtDataName]
	signature, err := answerTo(n.Annotations[nodeconfig.ChallengeAnnotation], bundle, signer, n.Annotations[nodeconfig.SignatureAnnotation])
	if err != nil {
		return fmt.Errorf("the Secret %s: %w", s.Authority.Name, err)
	}
	if n.Annotations[nodeconfig.AuthoritiesAnnotation] == string(bundle) && n.Annotations[nodeconfig.SignatureAnnotation] == signature {
		return nil
	}
	before := n.DeepCopy()
	metav1.SetMetaDataAnnotation(&n.ObjectMeta, nodeconfig.AuthoritiesAnnotation, string(bundle))
	if delete(n.Annotations, nodeconfig.SignatureAnnotation); signature != "" {
		n.Annotations[nodeconfig.SignatureAnnotation] = signature
	}
	return client.IgnoreNotFound(s.client.Patch(ctx, n, client.MergeFrom(before)))
}

// answerTo returns the signature of the target for a challenge; "" without a challenge. A valid signature on the Node is
// kept, because each new signature is an event for the machine.
func answerTo(challenge string, bundle []byte, signer func() (tls.Certificate, error), has string) (string, error) {
	if challenge == "" {
		return "", nil
	}
	pair, err := signer()
	if err != nil {
		return "", err
	}
	if nodeconfig.VerifyAuthorities([]*x509.Certificate{pair.Leaf}, bundle, challenge, has) == nil {
		return has, nil
	}
	key, ok := pair.PrivateKey.(crypto.Signer)
	if !ok {
		return "", fmt.Errorf("expected a private key that can sign, found %T", pair.PrivateKey)
	}
	return nodeconfig.SignAuthorities(key, bundle, challenge)
}

// workersOnTheWay returns the workers without a Node: those with bootstrap data of their own, and those of pools that have started. Core
// gives Machines of pools an empty name of data, because they share the data of the pool. This gets the target under its present name: a
// Machine that starts later reads the target, and nothing records the authorities that a Machine that has started has read.
func workersOnTheWay(machines *clusterv1.MachineList) (own, pooled []*clusterv1.Machine) {
	for i := range machines.Items {
		m := &machines.Items[i]
		switch {
		case util.IsControlPlaneMachine(m) || m.Status.NodeRef.IsDefined() || !m.DeletionTimestamp.IsZero():
		case ptr.Deref(m.Spec.Bootstrap.DataSecretName, "") != "":
			own = append(own, m)
		case ptr.Deref(m.Status.Initialization.InfrastructureProvisioned, false):
			pooled = append(pooled, m)
		}
	}
	return own, pooled
}

// finishRotation removes the old authority from the ConfigMap that API servers publish for other servers: API servers add
// authorities to it and never remove any. It also removes the target from the Nodes, because a restored backup would bring
// back an outdated one. finished is false when the next pass has to reach more Nodes.
func finishRotation(ctx context.Context, s *scope) (finished bool, err error) {
	if s.client == nil {
		return false, errors.New("there is no connection to the workload cluster")
	}
	reading, cancel := context.WithTimeout(ctx, workloadTimeout)
	defer cancel()
	published := &corev1.ConfigMap{}
	err = s.client.Get(reading, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: "extension-apiserver-authentication"}, published)
	if client.IgnoreNotFound(err) != nil {
		return false, err
	}
	if err == nil {
		before := published.DeepCopy()
		if published.Data == nil {
			published.Data = map[string]string{}
		}
		published.Data["client-ca-file"] = string(s.Authority.Data[secret.TLSCrtDataName])
		if err := s.client.Patch(reading, published, client.MergeFrom(before)); err != nil {
			return false, err
		}
	}
	nodes := &corev1.NodeList{}
	if err := s.client.List(reading, nodes); err != nil {
		return false, err
	}
	reached, err := onePass(ctx, nodes.Items, func(ctx context.Context, n *corev1.Node) error {
		if _, told := n.Annotations[nodeconfig.AuthoritiesAnnotation]; !told {
			return nil
		}
		before := n.DeepCopy()
		delete(n.Annotations, nodeconfig.AuthoritiesAnnotation)
		delete(n.Annotations, nodeconfig.SignatureAnnotation)
		return client.IgnoreNotFound(s.client.Patch(ctx, n, client.MergeFrom(before)))
	})
	return reached == len(nodes.Items), err
}
