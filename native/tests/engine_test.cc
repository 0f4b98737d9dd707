// The engine end to end: ranks are threads of this process, over one memfd segment or over socket pairs. Meant to be
// run under ASan, UBSan and TSan as well. `hetcoll_engine_test [NAME]` runs the scenarios whose names begin so.

#include <string_view>

#include "harness.h"

namespace hetcoll::testing {

// calls_test.cc
void Types();
void Sizes();
void Flight();
void Messages();
void Exchanging();
void Background();
void Wakeups();
void Failing();
void Leaving();
void Lending();
void LendingAhead();
void Staging();

// codec_test.cc
void Codecs();
void CompressedSums();

// plan_test.cc
void CheckPlans();
void ComparePasses();
void BindManySteps();
void CheckLocals();
void StoringSums();
void FuzzPlans();

// shm_test.cc
void Returning();
void NotReturning();
void Handing();
void LentInOrder();
void Windows();
void Claims();
void Fragments();
void Stores();
void BadHeaders();

// shm_loans_test.cc
void BorrowedBuffers();
void GivenSends();
void LoansOfEngines();

// shm_private_test.cc
void Private();
void NotPrivate();
void HugePages();
void Withdrawing();
void DeadSender();
void PrivateMessages();

// protocol_choice_test.cc
void Bands();
void Trials();
void TimedMessages();
void FalseBands();

// fault_test.cc
void Mismatches();
void Garbage();
void FaultSpecs();
void HarmlessFaults();
void HarmfulFaults();
void TruncatedFrames();

// integrity_test.cc
void Checksums();
void SentStreams();
void AcknowledgedBytes();
void ResetSockets();
void EncryptedStreams();
void WrongKeys();
void EncryptedUntilReset();
void EncryptedAndAsleep();
void ChangedRecords();
void EncryptedLinks();
void EncryptedAndReset();
void ChangedLinks();
void ResetAfterTheCall();
void ResetForGood();
void LyingAcknowledgements();
void SpoiledBytes();
void SpoiledAndSentAgain();
void SpoiledAfterTheCall();
void SpoiledForEver();
void SpoiledAndReset();
void CheckedLinks();
void Samples();

void GpusOfOneHost();
void SignalsOfPrograms();
void GpusOfManyHosts();
void BrokenProxies();
void ProxiesOverVerbs();
void ProxiesThatLoseRails();
void ProxiesThatLoseAllRails();
void ProxiesThatLoseAllRailsAndSockets();
void ProxiesWhoseCopiesFail();
void ProxiesThatNeverHadARail();
void ProxiesThatDiffer();
void ProxiesThatAreTried();
void ProxiesThatCannotReadBack();
void ProxiesWhoseRailsComeBack();
void ProxiesWhoseLastRailComesBack();
void ProxiesThatWaitForWhatComesAgain();
void GpusAndHosts();
void OneSided();
void OrderedRequests();
void LooksAreFew();
void ClosingWindows();
void OneSidedOfDevices();
void ClosingDevices();
void ClosingUnderOwnDevice();
void ClosingSeenWindows();
void SlowDevices();
void PutsBehindEachOther();
void LateCounts();
void UnlikeWindows();
void TablesOfMoves();
void GatedTransfers();
void FailingDevices();
void LeavingWindows();
void CutRequests();
void PulledWithoutADevice();  // strangers_test.cc
void AnsweredBeforeItIsAsked();
void AskedForWhatIsGone();
void WordsThatChange();
void TakenUpThoughNotLost();

namespace {

constexpr Scenario kScenarios[] = {
    {"plans", CheckPlans, kAlone},
    {"plans: passes", ComparePasses, kAlone},
    {"plans: many steps", BindManySteps, kAlone},
    {"locals", CheckLocals, kAlone},
    {"sums", StoringSums},
    {"fuzz", FuzzPlans, kAlone},
    {"codecs", Codecs, kAlone},
    {"compressed", CompressedSums},
    {"types", Types},
    {"sizes", Sizes},
    {"flight", Flight},
    {"messages", Messages},
    {"exchanging", Exchanging},
    {"background", Background},
    {"wakeups", Wakeups},
    {"failing", Failing},
    {"leaving", Leaving},
    {"mismatches", Mismatches},
    {"garbage", Garbage},
    {"faultspecs", FaultSpecs, kAlone},
    {"lending", Lending},
    {"lending: ahead", LendingAhead},
    {"staging", Staging},
    {"slots", Returning, kAlone},
    {"slots: kept", NotReturning, kAlone},
    {"slots: handed over", Handing, kAlone},
    {"slots: how much of a ring", Windows, kAlone},
    {"slots: claimed", Claims, kAlone},
    {"slots: lent in order", LentInOrder, kAlone},
    {"slots: fragments", Fragments, kAlone},
    {"slots: stores", Stores},
    {"slots: headers", BadHeaders, kAlone},
    {"loans", BorrowedBuffers, kAlone},
    {"loans: which sends", GivenSends, kAlone},
    {"loans: of engines", LoansOfEngines},
    {"private", Private, kAlone},
    {"private: not", NotPrivate, kAlone},
    {"private: huge pages", HugePages, kAlone},
    {"private: withdrawn", Withdrawing, kAlone},
    {"private: dead", DeadSender, kAlone},
    {"private: messages", PrivateMessages},
    {"ways: bands", Bands, kAlone},
    {"ways: trials", Trials, kAlone},
    {"ways: timed messages", TimedMessages, kAlone},
    {"ways: false bands", FalseBands, kAlone},
    {"harmless", HarmlessFaults},
    {"harmful", HarmfulFaults},
    {"truncated", TruncatedFrames},
    {"mending: what was sent", SentStreams, kAlone},
    {"mending: the kernel's word", AcknowledgedBytes},
    {"mending: resets", ResetSockets},
    {"tls: streams", EncryptedStreams, kAlone},
    {"tls: keys", WrongKeys, kAlone},
    {"tls: until reset", EncryptedUntilReset, kAlone},
    {"tls: asleep", EncryptedAndAsleep, kAlone},
    {"tls: changed", ChangedRecords, kAlone},
    {"tls: links", EncryptedLinks},
    {"tls: resets", EncryptedAndReset},
    {"tls: changed links", ChangedLinks},
    {"mending: after the call", ResetAfterTheCall},
    {"mending: for good", ResetForGood},
    {"mending: tries", LyingAcknowledgements},
    {"checksums", Checksums, kAlone},
    {"integrity: spoiled", SpoiledBytes},
    {"integrity: sent again", SpoiledAndSentAgain},
    {"integrity: sent again after the call", SpoiledAfterTheCall},
    {"integrity: spoiled for ever", SpoiledForEver},
    {"integrity: spoiled and reset", SpoiledAndReset},
    {"integrity: sound", CheckedLinks},
    {"integrity: samples", Samples},
    {"gpus", GpusOfOneHost},
    {"signals", SignalsOfPrograms},
    {"gpus: proxy", GpusOfManyHosts},
    {"gpus: broken", BrokenProxies},
    {"rdma: all is well", ProxiesOverVerbs},
    {"rdma: a rail is lost", ProxiesThatLoseRails},
    {"rdma: all rails are lost", ProxiesThatLoseAllRails},
    {"rdma: all rails and sockets are lost", ProxiesThatLoseAllRailsAndSockets},
    {"rdma: a copy beside TCP fails", ProxiesWhoseCopiesFail},
    {"rdma: there never was a rail", ProxiesThatNeverHadARail},
    {"rdma: different calls", ProxiesThatDiffer},
    {"rdma: tried", ProxiesThatAreTried},
    {"rdma: no reading back", ProxiesThatCannotReadBack},
    {"rdma: rails come back", ProxiesWhoseRailsComeBack},
    {"rdma: the last rail comes back", ProxiesWhoseLastRailComesBack},
    {"rdma: sent again, later", ProxiesThatWaitForWhatComesAgain},
    {"gpus: mixed", GpusAndHosts},
    {"windows", OneSided},
    {"windows: ordered", OrderedRequests},
    {"windows: few looks", LooksAreFew, kAlone},
    {"windows: closed", ClosingWindows},
    {"windows of devices", OneSidedOfDevices},
    {"windows of devices: closed", ClosingDevices},
    {"windows of the host: closed under its device", ClosingUnderOwnDevice},
    {"windows of devices that see each other: closed", ClosingSeenWindows},
    {"windows of slow devices", SlowDevices},
    {"puts behind each other", PutsBehindEachOther},
    {"puts of late counts", LateCounts},
    {"windows of unlike numbers", UnlikeWindows},
    {"tables of moves", TablesOfMoves},
    {"windows of devices: streams", GatedTransfers},
    {"windows of devices: failed", FailingDevices},
    {"windows: left", LeavingWindows},
    {"windows: cut", CutRequests},
    {"strangers: pulled without a device", PulledWithoutADevice, kAlone},
    {"strangers: answered before", AnsweredBeforeItIsAsked, kAlone},
    {"strangers: asked again", AskedForWhatIsGone, kAlone},
    {"strangers: words that change", WordsThatChange, kAlone},
    {"strangers: taken up", TakenUpThoughNotLost},
};

}  // namespace

int Main(std::string_view prefix) { return Play(kScenarios, prefix); }

}  // namespace hetcoll::testing

int main(int argc, char** argv) { return hetcoll::testing::Main(argc > 1 ? argv[1] : ""); }
