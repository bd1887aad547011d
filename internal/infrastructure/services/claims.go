package services

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/addresses"
	"capstan.dev/capstan/internal/reconciling"
)

// readClaims reads the claims live: they are the record of the hosts that have addresses, and a decision on an old record
// could give an address to two hosts.
func (r *Reconciler) readClaims(ctx context.Context, s *scope) error {
	claims, err := claimsOf(ctx, r.LiveClient, s.capstan, s.cluster.Name)
	s.setClaims(claims)
	return err
}

func (s *scope) setClaims(claims []capiipamv1.IPAddressClaim) {
	s.claims, s.records, s.recorded = map[string]*capiipamv1.IPAddressClaim{}, map[string][]string{}, map[string]int{}
	for i := range claims {
		s.addClaim(&claims[i])
	}
}

// maxRecorded bounds the hosts in the record of a claim: that of the address, and former ones that have not confirmed its end.
const maxRecorded = 64

func (s *scope) addClaim(claim *capiipamv1.IPAddressClaim) {
	s.claims[claim.Name] = claim
	s.setRecord(claim.Name, hostNames(claim.Annotations[infrav1.ServiceHostsAnnotation], maxRecorded))
}

// setRecord changes the record of a claim in memory.
func (s *scope) setRecord(claim string, hosts []string) {
	for _, name := range s.records[claim] {
		s.recorded[name]--
	}
	for _, name := range hosts {
		s.recorded[name]++
	}
	s.records[claim] = hosts
}

// currentHost is the first of the hosts that may have the address of a claim.
func (s *scope) currentHost(claim string) string {
	if hosts := s.records[claim]; len(hosts) > 0 {
		return hosts[0]
	}
	return ""
}

func claimsOf(ctx context.Context, c client.Reader, capstan *infrav1.CapstanCluster, cluster string) ([]capiipamv1.IPAddressClaim, error) {
	list := &capiipamv1.IPAddressClaimList{}
	if err := c.List(ctx, list, client.InNamespace(capstan.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: cluster}); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list.Items, func(claim capiipamv1.IPAddressClaim) bool {
		controller := metav1.GetControllerOfNoCopy(&claim)
		return !isClaimName(capstan.Name, claim.Name) || controller != nil && (controller.Kind != infrav1.ClusterKind || controller.Name != capstan.Name)
	}), nil
}

// claimSuffix is the rest of the name of a claim after claimPrefix; see claimName.
var claimSuffix = regexp.MustCompile(`^[0-9a-f]{16}(-ipv6)?$`)

// isClaimName reports whether claimName can have made a name. The claims of a machine whose name begins like that of a Service, and
// those of users, have other names. They can be without an owner, after a restore of a backup.
func isClaimName(cluster, name string) bool {
	suffix, found := strings.CutPrefix(name, claimPrefix(cluster))
	return found && claimSuffix.MatchString(suffix)
}

// ClaimsGone deletes the claims for the Services of a cluster that hosts no longer have, and reports whether none remains.
// Claims are watched.
func ClaimsGone(ctx context.Context, live client.Client, capstan *infrav1.CapstanCluster, cluster string) (bool, error) {
	claims, err := claimsOf(ctx, live, capstan, cluster)
	if err != nil {
		return false, err
	}
	if err := freeAll(ctx, live, live, client.ObjectKeyFromObject(capstan), retained); err != nil {
		return false, err
	}
	names := make([]string, 0, len(claims))
	for i := range claims {
		names = append(names, claims[i].Name)
	}
	return addresses.ClaimsGone(ctx, live, capstan, cluster, names...)
}

// pool is the pool of the addresses of a family.
func (s *scope) pool(family corev1.IPFamily) capiipamv1.IPPoolReference {
	ref := poolsOf(s.capstan.Spec.Services.LoadBalancer)[family]
	return capiipamv1.IPPoolReference{APIGroup: ref.APIGroup, Kind: ref.Kind, Name: ref.Name}
}

// adoptClaims gives the claims a lost owner reference back (ALL-11), and the watch label of the CapstanCluster.
func (r *Reconciler) adoptClaims(ctx context.Context, s *scope) error {
	var errs []error
	for _, claim := range s.claims {
		errs = append(errs, client.IgnoreNotFound(addresses.AdoptClaim(ctx, r.LiveClient, s.capstan, s.cluster.Name, claim)))
	}
	return errors.Join(errs...)
}

// addressFor returns the address of a Service in a family and the claim of the address. Without an address, waiting is the
// reason.
func (r *Reconciler) addressFor(ctx context.Context, s *scope, service *corev1.Service, family corev1.IPFamily) (address netip.Addr, claim *capiipamv1.IPAddressClaim, waiting string, err error) {
	pool := s.pool(family)
	name := claimName(s.capstan.Name, service, family)
	claim = s.claims[name]
	if claim == nil {
		if claim, err = addresses.EnsureClaim(ctx, r.LiveClient, s.capstan, s.cluster.Name, pool, name); err != nil {
			return address, nil, "", err
		}
		s.addClaim(claim)
	}
	if claim.Spec.PoolRef != pool {
		return address, nil, fmt.Sprintf("its address is still from the former pool %s", claim.Spec.PoolRef.Name), nil
	}
	if want := service.Namespace + "/" + service.Name; claim.Annotations[infrav1.ServiceAnnotation] != want && claim.DeletionTimestamp.IsZero() {
		if err := reconciling.Change(ctx, r.LiveClient, claim, func() {
			metav1.SetMetaDataAnnotation(&claim.ObjectMeta, infrav1.ServiceAnnotation, want)
		}); err != nil {
			return address, nil, "", err
		}
	}
	found, waiting, err := addresses.FetchAddress(ctx, r.LiveClient, claim)
	if err != nil || found == nil {
		return address, nil, waiting + " (from " + pool.Kind + " " + pool.Name + ")", err
	}
	address, err = netip.ParseAddr(found.Spec.Address)
	if err != nil || familyOf(address) != family {
		return address, nil, fmt.Sprintf("%s %s provided %s: expected an %s address", pool.Kind, pool.Name, found.Spec.Address, family), nil
	}
	waiting, err = r.retain(ctx, found)
	if err != nil || waiting != "" {
		return address, nil, waiting, err
	}
	return address, claim, "", nil
}

// recordHosts writes the hosts that may have the address of a claim.
func (r *Reconciler) recordHosts(ctx context.Context, s *scope, claim *capiipamv1.IPAddressClaim, hosts []string) error {
	if slices.Equal(s.records[claim.Name], hosts) {
		return nil
	}
	want := strings.Join(hosts, ",")
	err := reconciling.Change(ctx, r.LiveClient, claim, func() {
		metav1.SetMetaDataAnnotation(&claim.ObjectMeta, infrav1.ServiceHostsAnnotation, want)
	})
	if err != nil && (want != "" || !apierrors.IsNotFound(err)) {
		return fmt.Errorf("recording the hosts of the address of IPAddressClaim %s: %w", claim.Name, err)
	}
	s.setRecord(claim.Name, hosts)
	return nil
}

// forget removes hosts from the records of the claims, with one write for each claim.
func (r *Reconciler) forget(ctx context.Context, s *scope, gone func(claim *capiipamv1.IPAddressClaim, host string) bool) (err error) {
	for name, claim := range s.claims {
		hosts := slices.DeleteFunc(slices.Clone(s.records[name]), func(host string) bool { return gone(claim, host) })
		err = errors.Join(err, r.recordHosts(ctx, s, claim, hosts))
	}
	return err
}
