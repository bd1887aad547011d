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
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
)

const (
	// nextCertName and nextKeyName are the keys, in the secret <cluster>-ca, of the authority that signs next.
	nextCertName = "next.crt"
	nextKeyName  = "next.key"
	// rotationRetry is how often a rotation that waits looks again: what Nodes and ConfigMaps of the workload
	// cluster say is no event here.
	rotationRetry = 2 * time.Second
)

// caName is the secret of the cluster's certificate authority.
func caName(s *scope) string { return secret.Name(s.cluster.Name, secret.ClusterCA) }

// rotation is what is known of the certificate authority without a look at the workload cluster.
func (s *scope) rotation() rotation {
	out := rotation{
		everywhere: split(s.controlPlane.Annotations[controlplanev1.AuthoritiesAnnotation]),
		after:      s.controlPlane.Spec.Certificates.RotateCAAfter.Time,
	}
	if s.authority == nil {
		return out
	}
	bundle := s.authority.Data[secret.TLSCrtDataName]
	out.secret, _ = nodeconfig.Fingerprints(bundle) // checkCertificate has said what is wrong
	out.owned = metav1.IsControlledBy(s.authority, s.controlPlane)
	out.next = len(s.authority.Data[nextKeyName]) > 0
	if cert, err := certs.DecodeCertPEM(bundle); err == nil && cert != nil {
		out.made = cert.NotBefore.Add(pki.Backdate)
	}
	return out
}

func split(list string) []string {
	if list == "" {
		return nil
	}
	return strings.Split(list, ",")
}

// readAuthority reads the certificate authority as it is stored.
func (r *Reconciler) readAuthority(ctx context.Context, s *scope) error {
	stored := &corev1.Secret{}
	if err := r.Client.Get(ctx, client.ObjectKey{Namespace: s.cluster.Namespace, Name: caName(s)}, stored); err != nil {
		return client.IgnoreNotFound(err)
	}
	s.authority = stored
	return nil
}

// authoritiesOf are those in the bootstrap data of a Machine.
func (r *Reconciler) authoritiesOf(ctx context.Context, machine *clusterv1.Machine) (made bool, has []string, err error) {
	name := ptr.Deref(machine.Spec.Bootstrap.DataSecretName, "")
	if name == "" {
		return false, nil, nil
	}
	data, err := r.getSecret(ctx, client.ObjectKey{Namespace: machine.Namespace, Name: name})
	if err != nil || data == nil {
		return true, nil, err
	}
	return true, split(data.Annotations[bootstrapv1.AuthoritiesAnnotation]), nil
}

// findOtherAuthorities adds to what is outdated the Machines that have other certificate authorities.
func (r *Reconciler) findOtherAuthorities(ctx context.Context, s *scope) error {
	state := s.rotation()
	for _, machine := range s.machines {
		made, has, err := r.authoritiesOf(ctx, machine)
		if err != nil {
			return err
		}
		if why := state.otherAuthorities(made, has); why != "" {
			s.outdated[machine.Name] = append(s.outdated[machine.Name], why)
		}
	}
	return nil
}

// reconcileRotation brings all of the cluster to the certificate authorities that the secret has, and
// does the next step once it is there.
func (r *Reconciler) reconcileRotation(ctx context.Context, s *scope) (again time.Duration) {
	if !s.initialized() || s.authority == nil {
		return 0
	}
	state := s.rotation()
	if state.underway() && !state.settled() {
		state.lacking = r.lacking(ctx, s, state)
		again = rotationRetry
	}
	step := state.step(now())
	if err := r.rotate(ctx, s, state, step); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "The next step of the certificate authority's rotation failed", "step", step)
		state.lacking = append(state.lacking, err.Error()) // The rest of the control plane does not wait for it.
	}
	state = s.rotation().with(state.lacking)
	r.setRotating(s, state)
	if step != rotationRests {
		again = rotationRetry
	} else if wait := state.after.Sub(now()); again == 0 && wait > 0 {
		again = wait
	}
	return again
}

func (r rotation) with(lacking []string) rotation {
	if !r.settled() {
		r.lacking = lacking
	}
	return r
}

// setRotating says how far the rotation is, once there was one, and tells of each phase.
func (r *Reconciler) setRotating(s *scope, state rotation) {
	kind := controlplanev1.CertificateAuthorityRotatingCondition
	rotating, reason, message := state.describe(now())
	before := conditions.Get(s.controlPlane, kind)
	if before == nil && !rotating && state.after.IsZero() {
		return
	}
	status := metav1.ConditionFalse
	if rotating {
		status = metav1.ConditionTrue
	}
	setCondition(s.controlPlane, kind, status, reason, message)
	if was := conditionReason(before); was != reason && (before != nil || rotating) {
		about, _, _ := strings.Cut(message, "\n")
		r.event(s, corev1.EventTypeNormal, reason, "RotateCA", "%s", cmp.Or(about, "The cluster has one certificate authority, and everything is signed by it"))
	}
}

func conditionReason(c *metav1.Condition) string {
	if c == nil {
		return ""
	}
	return c.Reason
}

// rotate does one step. Each is one write, so that it is done or not done.
func (r *Reconciler) rotate(ctx context.Context, s *scope, state rotation, step rotationStep) error {
	switch step {
	case rotationSettles:
		if len(state.everywhere) > 1 && len(state.secret) == 1 {
			if err := r.finishRotation(ctx, s); err != nil {
				return err
			}
		}
		return r.annotate(ctx, s, controlplanev1.AuthoritiesAnnotation, strings.Join(state.secret, ","))
	case rotationBegins:
		return r.writeAuthority(ctx, s, beginRotation)
	case rotationSigns:
		return r.writeAuthority(ctx, s, signWithNext)
	case rotationDrops:
		return r.writeAuthority(ctx, s, dropOld)
	}
	return nil
}

// writeAuthority changes the secret, if it is still as it was read.
func (r *Reconciler) writeAuthority(ctx context.Context, s *scope, change func(data map[string][]byte) error) error {
	after := s.authority.DeepCopy()
	if err := change(after.Data); err != nil {
		return err
	}
	err := r.Client.Patch(ctx, after, client.MergeFromWithOptions(s.authority, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) {
		return nil // The cache was behind: an event follows.
	}
	if err == nil {
		s.authority = after
	}
	return err
}

// newAuthority makes the certificate authority of a cluster. Unlike Cluster API's, it may sign the one
// that comes after it.
func newAuthority(now time.Time) (*certs.KeyPair, error) {
	signer, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	made, err := pki.NewAuthority("kubernetes", signer, now)
	if err != nil {
		return nil, err
	}
	key, err := pki.EncodeKey(signer)
	return &certs.KeyPair{Cert: pki.EncodeCert(made.Cert), Key: key}, err
}

// beginRotation makes a new authority. It is trusted from now on, and does not sign yet.
func beginRotation(data map[string][]byte) error {
	next, err := newAuthority(now())
	if err != nil {
		return err
	}
	data[nextCertName], data[nextKeyName] = next.Cert, next.Key
	data[secret.TLSCrtDataName] = joinPEM(data[secret.TLSCrtDataName], next.Cert)
	return nil
}

// signWithNext lets the new authority sign. The old one signs a last certificate, the new one's: who only knows
// the old one can go on to verify servers.
func signWithNext(data map[string][]byte) error {
	old, err := certs.DecodeCertPEM(data[secret.TLSCrtDataName])
	if err != nil {
		return err
	}
	delete(data, bootstrap.CrossCADataName)
	if mayHaveAuthorities(old) {
		cross, err := crossSign(data[nextCertName], data[secret.TLSCrtDataName], data[secret.TLSKeyDataName])
		if err != nil {
			return err
		}
		data[bootstrap.CrossCADataName] = cross
	}
	data[secret.TLSCrtDataName] = joinPEM(data[nextCertName], certs.EncodeCertPEM(old))
	data[secret.TLSKeyDataName] = data[nextKeyName]
	delete(data, nextCertName)
	delete(data, nextKeyName)
	return nil
}

// mayHaveAuthorities says that an authority may sign another one.
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

// dropOld leaves only the authority that signs.
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

// lacking brings the Nodes to what the secret says as soon as the control plane machines are there, and says who
// is not there yet. What cannot be asked is not there.
func (r *Reconciler) lacking(ctx context.Context, s *scope, state rotation) []string {
	out, err := r.lackingControlPlane(ctx, s, state)
	if err != nil {
		return []string{err.Error()}
	}
	if len(out) > 0 {
		return out
	}
	if s.workload.client == nil || s.workload.err != nil {
		return []string{"the workload cluster cannot be asked about its Nodes: " + fmt.Sprint(cmp.Or(s.workload.err, errors.New("there is no connection to it")))}
	}
	ctx, cancel := context.WithTimeout(ctx, workloadTimeout)
	defer cancel()
	if out, err = r.lackingNodes(ctx, s, state); err != nil {
		return []string{"the workload cluster cannot be asked about its Nodes: " + err.Error()}
	}
	return out
}

func (r *Reconciler) lackingControlPlane(ctx context.Context, s *scope, state rotation) ([]string, error) {
	known := s.fleet() // One that is stuck on a host that is gone is not waited for.
	machines := slices.DeleteFunc(s.machines.UnsortedList(), func(m *clusterv1.Machine) bool { return known.find(m.Name) == nil })
	holders, err := r.holders(ctx, machines)
	if err != nil {
		return nil, err
	}
	out := lackingMachines(state.secret, holders, "control plane Machine %s is to be replaced")
	if current := len(machines); len(out) == 0 && current != s.wish().replicas {
		out = append(out, fmt.Sprintf("the control plane has %d Machines of %d", current, s.wish().replicas))
	}
	return out, nil
}

// holders are Machines with what is in their bootstrap data, in the order of their names.
func (r *Reconciler) holders(ctx context.Context, machines []*clusterv1.Machine) ([]holder, error) {
	var out []holder
	for _, m := range machines {
		_, has, err := r.authoritiesOf(ctx, m)
		if err != nil {
			return nil, err
		}
		out = append(out, holder{name: m.Name, trusted: has})
	}
	slices.SortFunc(out, func(a, b holder) int { return strings.Compare(a.name, b.name) })
	return out, nil
}

// lackingNodes tells Nodes what to have, once kube-root-ca.crt, which pods get, is there, and looks what they say.
func (r *Reconciler) lackingNodes(ctx context.Context, s *scope, state rotation) ([]string, error) {
	published := &corev1.ConfigMap{}
	if err := s.workload.client.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: "kube-root-ca.crt"}, published); err != nil {
		return nil, err
	}
	if has, _ := nodeconfig.Fingerprints([]byte(published.Data["ca.crt"])); !slices.Equal(has, state.secret) {
		return []string{"the controller manager has not published the certificate authorities for pods yet"}, nil
	}
	workers, err := r.workersOnTheWay(ctx, s)
	if err != nil {
		return nil, err
	}
	out := lackingMachines(state.secret, workers, "Machine %s has no Node yet, and was made with other certificate authorities: when it has joined it follows; if it never does, delete it")
	nodes := &corev1.NodeList{}
	if err := s.workload.client.List(ctx, nodes); err != nil {
		return nil, err
	}
	var holders []holder
	for i := range nodes.Items {
		n := &nodes.Items[i]
		if gone, err := r.removeOrphan(ctx, s, n); err != nil || gone {
			if err != nil {
				return nil, err
			}
			continue
		}
		if err := r.tellNode(ctx, s, n); err != nil {
			return nil, err
		}
		holders = append(holders, holder{
			name: n.Name, trusted: split(n.Annotations[nodeconfig.TrustedAuthoritiesAnnotation]), signer: n.Annotations[nodeconfig.KubeletAuthorityAnnotation],
		})
	}
	return append(out, lackingNodes(state.secret, holders)...), nil
}

// removeOrphan deletes a Node whose Machine is gone. Cluster API does so itself, but only tries for ten seconds, and a
// connection of before may just then be refused, because it has a certificate of the old authority.
func (r *Reconciler) removeOrphan(ctx context.Context, s *scope, n *corev1.Node) (gone bool, err error) {
	name := n.Annotations[clusterv1.MachineAnnotation]
	if name == "" || n.Annotations[clusterv1.ClusterNameAnnotation] != s.cluster.Name || n.Annotations[clusterv1.ClusterNamespaceAnnotation] != s.cluster.Namespace {
		return false, nil
	}
	err = r.LiveClient.Get(ctx, client.ObjectKey{Namespace: s.cluster.Namespace, Name: name}, &clusterv1.Machine{})
	if !apierrors.IsNotFound(err) {
		return false, err
	}
	return true, client.IgnoreNotFound(s.workload.client.Delete(ctx, n, client.Preconditions{UID: &n.UID}))
}

// tellNode writes on a Node what its machine is to have, and signs it for a machine that has said its challenge.
func (r *Reconciler) tellNode(ctx context.Context, s *scope, n *corev1.Node) error {
	bundle := s.authority.Data[secret.TLSCrtDataName]
	signature, err := answerTo(n.Annotations[nodeconfig.ChallengeAnnotation], bundle, s.authority.Data[secret.TLSKeyDataName], n.Annotations[nodeconfig.SignatureAnnotation])
	if err != nil {
		return fmt.Errorf("the secret %s: %w", s.authority.Name, err)
	}
	if n.Annotations[nodeconfig.AuthoritiesAnnotation] == string(bundle) && n.Annotations[nodeconfig.SignatureAnnotation] == signature {
		return nil
	}
	before := n.DeepCopy()
	metav1.SetMetaDataAnnotation(&n.ObjectMeta, nodeconfig.AuthoritiesAnnotation, string(bundle))
	if delete(n.Annotations, nodeconfig.SignatureAnnotation); signature != "" {
		n.Annotations[nodeconfig.SignatureAnnotation] = signature
	}
	return client.IgnoreNotFound(s.workload.client.Patch(ctx, n, client.MergeFrom(before)))
}

// answerTo a challenge is the signature of what its machine is to have; "" when it has none, because somebody else
// has set it up, or because it has not looked yet. The signature that the Node has stays if it is right: no two are the
// same, and each one written is an event for the machine.
func answerTo(challenge string, bundle, key []byte, has string) (string, error) {
	if challenge == "" {
		return "", nil
	}
	pair, err := tls.X509KeyPair(bundle, key)
	if err != nil {
		return "", err
	}
	if nodeconfig.VerifyAuthorities([]*x509.Certificate{pair.Leaf}, bundle, challenge, has) == nil {
		return has, nil
	}
	signer, ok := pair.PrivateKey.(crypto.Signer)
	if !ok {
		return "", fmt.Errorf("want a private key that can sign, found %T", pair.PrivateKey)
	}
	return nodeconfig.SignAuthorities(signer, bundle, challenge)
}

// workersOnTheWay are the Machines that have bootstrap data and no Node.
func (r *Reconciler) workersOnTheWay(ctx context.Context, s *scope) ([]holder, error) {
	list := &clusterv1.MachineList{}
	if err := r.Client.List(ctx, list, client.InNamespace(s.cluster.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: s.cluster.Name}); err != nil {
		return nil, err
	}
	var out []*clusterv1.Machine
	for i := range list.Items {
		m := &list.Items[i]
		if _, controlPlane := m.Labels[clusterv1.MachineControlPlaneLabel]; !controlPlane && !m.Status.NodeRef.IsDefined() && m.DeletionTimestamp.IsZero() && m.Spec.Bootstrap.DataSecretName != nil {
			out = append(out, m)
		}
	}
	return r.holders(ctx, out)
}

// finishRotation takes the old authority out of what API servers publish for other servers: they add theirs to
// what is there, and never take any away. And Nodes forget what they were told: a backup may bring them back
// when it is not true any more.
func (r *Reconciler) finishRotation(ctx context.Context, s *scope) error {
	if s.workload.client == nil {
		return errors.New("there is no connection to the workload cluster")
	}
	ctx, cancel := context.WithTimeout(ctx, workloadTimeout)
	defer cancel()
	published := &corev1.ConfigMap{}
	err := s.workload.client.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: "extension-apiserver-authentication"}, published)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	if err == nil {
		before := published.DeepCopy()
		if published.Data == nil {
			published.Data = map[string]string{}
		}
		published.Data["client-ca-file"] = string(s.authority.Data[secret.TLSCrtDataName])
		if err := s.workload.client.Patch(ctx, published, client.MergeFrom(before)); err != nil {
			return err
		}
	}
	nodes := &corev1.NodeList{}
	if err := s.workload.client.List(ctx, nodes); err != nil {
		return err
	}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		if _, told := n.Annotations[nodeconfig.AuthoritiesAnnotation]; !told {
			continue
		}
		before := n.DeepCopy()
		delete(n.Annotations, nodeconfig.AuthoritiesAnnotation)
		delete(n.Annotations, nodeconfig.SignatureAnnotation)
		if err := s.workload.client.Patch(ctx, n, client.MergeFrom(before)); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}
